"""The variables of the ranks: which of this shell's reach other hosts, and those of -x and --env-file.

Tests mpiddp/launch/{variables,plan}.py. The promises have the command line for each MPI.
"""

from mpiddp.launch.variables import forwarded, is_secret, parse_env_file, without_values

PASSED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_DEVICE_ORDER"),
    *("NCCL_DEBUG", "NCCL_IB_PKEY", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME"),
    *("OMP_NUM_THREADS", "HIP_PLATFORM", "ROCR_X", "RCCL_X", "ZE_X", "ONEAPI_DEVICE_SELECTOR"),
    *("UCX_TLS", "FI_PROVIDER", "HF_HOME", "MPIDDP_DATA", "MPI4PY_LIBMPI"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "MKL_NUM_THREADS", "KMP_AFFINITY"),
    *("PYTHONHASHSEED", "PYTHONWARNINGS", "CUDNN_LOGLEVEL_DBG", "SLURM_JOB_ID"),
)
OF_A_HOST = ("HOME", "USER", "PYTHONHOME", "PWD", "SSH_AUTH_SOCK", "OMPI_MCA_btl", "SLURM_PROCID")
FREE = ("LD_PRELOAD", "WANDB_MODE", "AWS_REGION")
SECRETS = (
    *("HF_TOKEN", "NCCL_SECRET", "UCX_KEY", "TORCH_PASSWORD", "FI_CREDENTIALS", "HF_AUTH"),
    *("MPIDDP_COOKIE", "OMP_SESSION", "TORCH_DSN", "hf_token"),
)


def test_variables_of_the_allow_list_reach_the_ranks_and_no_secret():
    env = dict.fromkeys((*PASSED, *OF_A_HOST, *FREE, *SECRETS), "1")
    assert forwarded(env) == dict.fromkeys(sorted(PASSED), "1")
    assert forwarded(env, env_all=True) == dict.fromkeys(sorted((*PASSED, *FREE)), "1")
    assert all(map(is_secret, SECRETS))


FILE = r"""
# a comment
PLAIN=one two
export EXPORTED=three   # no comment
EMPTY=
SINGLE='as $written \n # ${HOME}'
DOUBLE="it's"
URL=postgres://u:p@h/db?a=b&c=$d
HERE
"""


def parse(text: str) -> dict[str, str]:
    return dict(parse_env_file(text.encode(), "f", {"HERE": "x"}))


def test_the_format_of_the_file():
    assert parse(FILE) == {
        "PLAIN": "one two",
        "EXPORTED": "three   # no comment",
        "EMPTY": "",
        "SINGLE": r"as $written \n # ${HOME}",
        "DOUBLE": "it's",
        "URL": "postgres://u:p@h/db?a=b&c=$d",
        "HERE": "x",
    }
    assert parse("\ufeffA=1\r\nB='2'\r\n") == {"A": "1", "B": "2"}  # as Windows writes it


def test_a_printed_command_has_no_values():
    exports = ["HF_TOKEN=abc", "MY_KEY=d=e", "A=h", "PLAIN=i", "TOKEN", "V="]
    own = ["-x", "HF_TOKEN=abc", "-xMY_KEY=d=e", "-x=A=h", "-vxPLAIN=i", "-x", "TOKEN", "-x", "V="]
    assert without_values([*own, "--hostfile", "f"], exports) == [
        *("-x", "HF_TOKEN=…", "-xMY_KEY=…", "-x=A=…", "-vxPLAIN=…", "-x", "TOKEN", "-x", "V=…"),
        *("--hostfile", "f"),
    ]
