"""The variables and files of each scheduler, as its documentation has them."""

from pathlib import Path

import pytest

from tests.support.machine import executable

# Slurm, sbatch(1), "Output environment variables". tests/unit/launch/test_starters.py has more of them.
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
# OpenPBS, pbsdsh(1B): "Each MPI rank gets a single line in the $PBS_NODEFILE"
# (https://github.com/openpbs/openpbs/blob/master/doc/man1/pbsdsh.1B); qsub(1B), "Environment variables".
# Torque, qsub(1B) (https://manpages.ubuntu.com/manpages/xenial/man1/qsub.1B.html): PBS_NODEFILE. Its file
# for nodes=2:ppn=2 has the same form.
PBS = {"PBS_JOBID": "1234.head", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "node_file"}
# IBM Spectrum LSF 10.1, "Environment variables set for job execution": LSB_MCPU_HOSTS, LSB_DJOB_HOSTFILE
# (https://www.ibm.com/support/knowledgecenter/en/SSWRJV_10.1.0/lsf_config_ref/lsf_envars_job_exec.html).
LSF = {"LSB_JOBID": "105", "LSB_MCPU_HOSTS": "n1 5 n2 3 ", "LSB_DJOB_HOSTFILE": "node_file"}
# sge_pe(5), "start_proc_args" ($pe_hostfile): host, slots, queue, processors. A line for each queue.
# https://manpages.ubuntu.com/manpages/noble/man5/sge_pe.5.html
GRID_ENGINE = {
    "JOB_ID": "3",
    "SGE_TASK_ID": "undefined",
    "NHOSTS": "2",
    "PE_HOSTFILE": "pe_hostfile",
}
PE_HOSTFILE = """\
n1 2 all.q@n1 UNDEFINED
n2 1 all.q@n2 UNDEFINED
n1 1 gpu.q@n1 0,0:0,1
"""
# flux-environment(7), "Initial program environment": FLUX_URI, and `flux getattr hostlist`.
# https://github.com/flux-framework/flux-core/blob/master/doc/man7/flux-environment.rst
FLUX = {"FLUX_URI": "local:///tmp/flux-xyz/local-0"}
# A dry run asks srun for its version, and whether the other two are on PATH.
PROGRAMS = {
    "flux": """[ "$*" = "getattr hostlist" ] && echo 'n[1-2]'""",
    "srun": "echo slurm 22.05.8",
    "qrsh": "",
    "blaunch": "",
}
# Kubeflow MPI Operator v2beta1, the environment of the Launcher (pkg/controller/mpi_job_controller.go).
# https://github.com/kubeflow/mpi-operator/blob/master/pkg/controller/mpi_job_controller.go
MPIJOB = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "mpi_hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
NODE_FILE = "n1.cluster\nn1.cluster\nn2.cluster\nn2.cluster\n"
MPI_HOSTFILE = "pi-worker-0.pi.default.svc slots=2\npi-worker-1.pi.default.svc slots=2\n"


def enter_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the folder, with the files that the variables above name, and stand-ins of programs on PATH."""
    (folder / "node_file").write_text(NODE_FILE)
    (folder / "pe_hostfile").write_text(PE_HOSTFILE)
    (folder / "mpi_hostfile").write_text(MPI_HOSTFILE)
    for name, text in PROGRAMS.items():
        executable(folder / name, text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder
