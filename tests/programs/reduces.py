"""Form a process group as any script for torchrun, and print who this rank is, and what it has received."""

import torch
import torch.distributed as dist
from identity import tell

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
tell(sum=total.item(), torch=torch.__version__, threads=torch.get_num_threads())
dist.destroy_process_group()
