"""The command of a rank in a container, as each runtime's documentation has it."""

import argparse
import os

import pytest

from mpiddp.hosts import containers
from mpiddp.hosts.containers import Image, container_of, job_in_image

ENV = {
    "RANK": "0",
    "NCCL_DEBUG": "INFO",
    "PATH": "/opt/bin",
    "PYTHONPATH": "/p",
    "LD_LIBRARY_PATH": "/l",
    "HOME": "/home/u",
    "CONDA_PREFIX": "/c",
    "VIRTUAL_ENV": "/v",
    "LC_ALL": "C",
    "DATA": "/data",
}


def command(image: str, *exported: str) -> list[str]:
    container, env = container_of("a-name", ["/data"], ENV, exported)
    assert env.keys() == {*ENV} - {
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "CONDA_PREFIX",
        "VIRTUAL_ENV",
    } | {*exported}
    assert env["PATH"].startswith(f"/opt/bin:{os.defpath}")  # where the program is
    return Image.of(image).command(container, ["python3", "train.py"])


@pytest.fixture(autouse=True)
def a_user_with_nvidia_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    monkeypatch.setattr(os, "getgroups", lambda: [100, 44])
    monkeypatch.setattr(containers, "_NVIDIA", os.devnull)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_docker_and_podman_pass_what_they_are_told(program, tmp_path):
    words = command(f"{program}://org/image:2", "PYTHONPATH", "HOME")
    at = words.index("org/image:2")
    assert (words[:2], words[at:]) == ([program, "run"], ["org/image:2", "python3", "train.py"])
    named = {word.removeprefix("--env=") for word in words if word.startswith("--env=")}
    assert named == {"RANK", "NCCL_DEBUG", "DATA", "PYTHONPATH", "HOME=/tmp", "HOME", "USER"}
    assert words.index("--env=HOME") > words.index("--env=HOME=/tmp")
    mounts = {f"--mount=type=bind,source={path},target={path}" for path in (tmp_path, "/data")}
    assert mounts | {f"--workdir={tmp_path}"} <= {*words[:at]}
    assert {"--network=host", "--ipc=host", "--pid=host", "--user=1000:100", "--name=a-name"} <= {
        *words[:at]
    }
    own = (
        {"--gpus=all", "--group-add=44"}
        if program == "docker"
        else {"--device=nvidia.com/gpu=all", "--userns=keep-id"}
    )
    assert own <= {*words[:at]}


def test_a_file_names_its_program(tmp_path):
    here, file = str(tmp_path), str(tmp_path / "image.sif")
    binds = [f"--bind={here}", "--bind=/data"]
    assert command("image.sif") == [
        "apptainer",
        "exec",
        f"--pwd={here}",
        *binds,
        "--nv",
        file,
        "python3",
        "train.py",
    ]
    words = command("image.sqsh")
    assert words[:4] == ["enroot", "start", "--rw", f"--mount={here}:{here}"]
    assert words[-4:] == ['cd "$0" && exec "$@"', here, "python3", "train.py"]
    assert "--env=DATA" in words
    assert Image.of("image.sif").facts == ["stat", "--format=image=%s", file]


def test_the_first_program_that_is_installed_runs_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in ("podman", "docker"):
        (tmp_path / program).touch(mode=0o755)
        assert Image.of("torch:2") == (program, "torch:2")
        (tmp_path / program).unlink()
    assert Image.of("torch:2").program == "docker"  # which the preflight then names
    for text in (
        "rkt://image",
        "docker://",
        "docker://--privileged",
        "podman://dir:/tmp/of-a-colleague",
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="is no image"):
            Image.of(text)


def test_gpus_that_are_hidden_need_no_toolkit(monkeypatch):
    monkeypatch.setitem(ENV, "CUDA_VISIBLE_DEVICES", "")
    assert "--gpus=all" not in command("docker://image")
    assert "--nv" not in command("image.sif")


def test_a_warning_of_the_runtime_is_no_image():
    said = "WARN[0000] no user session\nimage=[sha256:1][][]\n"
    assert containers.identity(said) == "image=[sha256:1][][]"
    assert containers.identity("Error: a:1: image not known\n") == ""


def test_a_script_needs_no_mpiddp_in_the_image():
    assert job_in_image(("train.py", "--lr", "1")) == (
        "--",
        "python3",
        "-u",
        "train.py",
        "--lr",
        "1",
    )
    assert job_in_image(("-m", "tool", "a")) == ("--", "python3", "-u", "-m", "tool", "a")
    assert job_in_image(("--", "./run", "a")) == ("--", "./run", "a")
