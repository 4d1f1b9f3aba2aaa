"""Tensors that say they are on a GPU, and hold their data on the CPU."""

from typing import Any

import torch
import torch.utils._foreach_utils

from grpo_megatron.pretended_cuda import synchronisations


class PretendedTensor(torch.Tensor):
    """A tensor of any shape and dtype on `cuda:N`; `held` is the CPU tensor with its data.

    Both have the same sizes and strides. Views of one are views of the other, so an operation in
    place is seen through all of them."""

    held: torch.Tensor

    # functions see it as a plain tensor; what they do comes to `__torch_dispatch__`
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> "PretendedTensor":
        """Wrap `held`, without gradient."""
        make_wrapper: Any = torch.Tensor._make_wrapper_subclass
        made: PretendedTensor = make_wrapper(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # not as in its stubs
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute without the mode: in threads that it was not entered in."""
        from grpo_megatron.pretended_cuda.dispatch import run

        return run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.held}, device='{self.device}')"

    # --- what would read a GPU's memory from Python

    def tolist(self) -> Any:
        """Copy to the host, as lists of numbers."""
        synchronisations.note(synchronisations.TO_HOST)
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError as torch does, unless `force`."""
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.cpu().detach().numpy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the data, as torch does from a GPU: it comes back on the same device."""
        synchronisations.note(synchronisations.TO_HOST)
        return _unpickled, (self.held.detach(), str(self.device), self.requires_grad)

    # --- what is asked of storages

    def data_ptr(self) -> int:
        """Address of the first element, here one of the CPU's."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the CPU's storage: views of one tensor share it."""
        return self.held.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory is freed when nothing refers to it."""

    # --- `data`, by which buffers of gradients and weights are put under parameters

    @property
    def data(self) -> "PretendedTensor":
        """The same data without gradient."""
        return PretendedTensor(self.held.detach(), self.device)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, PretendedTensor):
            raise RuntimeError(
                f"incompatible tensor type: data of a tensor on {self.device} cannot be set to "
                f"one on {value.device}"
            )
        described: Any = torch.Tensor.data
        described.__set__(self, value)  # sizes and strides
        self.held = value.held


def _unpickled(held: torch.Tensor, device: str, requires_grad: bool) -> PretendedTensor:
    return PretendedTensor(held, torch.device(device)).requires_grad_(requires_grad)  # type: ignore[return-value]


def count_as_plain() -> None:
    """Let torch's optimizers take their paths for tensors of a GPU, which are for plain types."""
    plain_types: list[Any] = torch.utils._foreach_utils._foreach_supported_types
    plain_types.append(PretendedTensor)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor on a device holds; one on the host as it is."""
    if isinstance(tensor, PretendedTensor):
        return tensor.held
    return tensor


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in an argument, which may be a list of lists. torch's trees take longer."""
    if isinstance(value, torch.Tensor):
        return [value]
    found = []
    if isinstance(value, list | tuple):
        for part in value:
            found += tensors_in(part)
    return found
