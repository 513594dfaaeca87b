"""A run in a bucket of a local S3 server.

python tests/programs/object_storage.py serve               # prints its URL, for AWS_ENDPOINT_URL
mpiddp launch -n 2 tests/programs/object_storage.py train   # resumes, saves three more steps, prints both
python tests/programs/object_storage.py list                # prints the whole checkpoints
python tests/programs/object_storage.py damage FILE         # overwrites an object of the run
python tests/programs/object_storage.py unfinish FOLDER     # removes COMPLETE, as an upload that was killed
"""

import signal
import sys

RUN = "models/runs/a"
ADDRESS = f"s3://{RUN}"


def serve() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    signal.pause()


def train() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import mpiddp

    with mpiddp.process_group(backend="gloo") as world:
        whole = torch.nn.ParameterDict({"a": torch.zeros(3)})
        with mpiddp.Checkpoints(ADDRESS, every=None, keep=2) as checkpoints:
            saved = checkpoints.resume()
            if saved:
                saved.load_into(whole=whole)
                assert whole["a"].tolist() == [saved.step] * 3
                assert saved.state["sharded"]["b"].full_tensor().tolist() == [saved.step] * 4
            first = saved.step if saved else 0
            mesh = init_device_mesh("cpu", (world.world_size,))
            for step in range(first + 1, first + 4):
                whole["a"].data.fill_(step)
                part = distribute_tensor(torch.full((4,), float(step)), mesh, [Shard(0)])
                mpiddp.log_metrics(step, loss=1 / step)
                checkpoints.save(step, whole=whole, sharded={"b": part})
        if world.rank == 0:
            print(f"from {first} to {first + 3}", flush=True)


def change(verb: str, *names: str) -> None:
    import s3fs

    files = s3fs.S3FileSystem(use_listings_cache=False)
    if verb == "create":
        files.mkdir(RUN.partition("/")[0])
    elif verb == "list":
        names = [path.split("/")[-2] for path in files.find(RUN) if path.endswith("COMPLETE")]
        print(*sorted(names), flush=True)
    elif verb == "damage":
        files.pipe_file(f"{RUN}/checkpoints/{names[0]}", b"x")
    else:
        files.rm_file(f"{RUN}/checkpoints/{names[0]}/COMPLETE")


if __name__ == "__main__":
    verb = sys.argv[1]
    own = {"serve": serve, "train": train}
    own[verb]() if verb in own else change(verb, *sys.argv[2:])
