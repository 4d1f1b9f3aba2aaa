"""The parts of `prove`, in the order in which they run: what others rest on comes first."""

from grpo_megatron.prove.part import Part, a_gpu, two_gpus
from grpo_megatron.prove.parts import device, layouts, machine, nodes

PARTS = (
    Part(
        "machine",
        "GPUs, driver, versions of everything, and the kernels that are chosen",
        machine.run,
        usual_s=0.0,
        limit_s=120.0,
    ),
    Part(
        "device",
        "three optimizer steps in float32 on the GPU are those of the CPU: dense, experts, "
        "latent attention",
        device.run,
        needs=(a_gpu,),
        usual_s=45.0,
        limit_s=240.0,
    ),
    Part(
        "layouts",
        "tensor, pipeline, expert and data parallelism give the losses and norms of one rank",
        layouts.run,
        needs=(a_gpu, two_gpus),
        usual_s=60.0,
        limit_s=240.0,
    ),
    Part(
        "nodes",
        "the same over the network between the nodes of this Slurm job",
        nodes.run,
        needs=(a_gpu, nodes.several_nodes),
        usual_s=60.0,
        limit_s=300.0,
    ),
)
