"""The reference of the public Python names, from their docstrings, which ruff checks (pyproject.toml).

python -m docs.api_reference     # writes docs/api/index.html; needs: pip install -c constraints.txt pdoc
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path

import pdoc
import pdoc.render

import mpiddp

PAGES = ("mpiddp", "mpiddp.train.resnet")  # with all names of their __all__
FOLDER = Path(__file__).parent / "api"


def main() -> None:
    for page in PAGES:
        module = import_module(page)
        for name in module.__all__:  # which the package loads on first use
            vars(module)[name] = getattr(module, name)
    footer = f"mpiddp {mpiddp.__version__}"
    pdoc.render.configure(docformat="google", show_source=False, footer_text=footer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # pdoc looks up the annotations of World, a NamedTuple, outside of their module.
        warnings.filterwarnings("ignore", "Error parsing type annotation ForwardRef")
        # The pages of modules that are no part of the interface are left out.
        pdoc.pdoc(PAGES[0], rf"!{PAGES[0]}\..+", *PAGES[1:], output_directory=FOLDER)
    print(f"{FOLDER}/index.html")


if __name__ == "__main__":
    main()
