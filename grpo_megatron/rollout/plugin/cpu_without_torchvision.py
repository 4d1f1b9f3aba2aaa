"""vLLM's Qwen2.5-VL and Qwen3-VL need torchvision twice, whose published builds are for CUDA:

- vllm/model_executor/models/qwen2_vl.py:43 and qwen3_vl.py:38 import `smart_resize` from the image
  processor of transformers that needs it. The same function is in the processor of Pillow and
  NumPy, which transformers takes by itself where torchvision is not installed.
- vllm/model_executor/models/qwen2_5_vl.py:1188 and qwen3_vl.py:929 make transformers' processor
  with its video part, which has no other form. Engines of a run are asked about images only."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

_WITH_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_WITH_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_PROCESSORS = ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")


def apply() -> None:
    """Make up for torchvision where it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    sys.modules.setdefault(_WITH_TORCHVISION, _PillowModule(_WITH_TORCHVISION))
    from vllm.multimodal.processing.context import InputProcessingContext

    original = InputProcessingContext.get_hf_processor

    def get_hf_processor(
        self: InputProcessingContext, wanted: Any = None, /, **settings: object
    ) -> Any:
        if getattr(wanted, "__name__", "") in _PROCESSORS:
            wanted = _images_only(wanted)
        return original(self, wanted, **settings)

    patched: Any = InputProcessingContext
    patched.get_hf_processor = get_hf_processor


class _PillowModule(ModuleType):
    """Looks names up in the module of Pillow's processor, which it imports when first asked."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of every module
            raise AttributeError(name)
        return getattr(importlib.import_module(_WITH_PILLOW), name)


class _NoVideos:
    """In the place of a video part: one without settings, but those by which vLLM computes how many
    tokens a video of Qwen3-VL would have (qwen3_vl.py:1043). They are transformers' own."""

    size: ClassVar[dict[str, int]] = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
    temporal_patch_size = 2

    class valid_kwargs:  # the name that vLLM asks for
        """Of no setting."""


@cache
def _images_only(processor: type[Any]) -> type[Any]:
    """Derive a processor without a video part from transformers' class."""

    class ImagesOnly(processor):  # type: ignore[misc]
        """Transformers loads the parts that the parameters of `__init__` name."""

        video_processor = _NoVideos

        def __init__(
            self,
            image_processor: Any = None,
            tokenizer: Any = None,
            chat_template: str | None = None,
            **_: Any,
        ):
            self.image_token = "<|image_pad|>"
            self.video_token = "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            super(processor, self).__init__(image_processor, tokenizer, chat_template=chat_template)

    return ImagesOnly
