"""A trainer publishes a model that sees to a vLLM server; both agree about prompts with images.

gloo and CPU kernels: this says nothing about NCCL or about the kernels of a GPU.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.images import patches_of
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.rollout.engine_images import EngineImages
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Prompt, PromptImage
from tests.integration.conftest import TOLERANCE, publishing
from tests.integration.test_publish import assert_differ, train_request
from tests.rollout.engines import Server
from tests.rollout.servers import DUMMY
from tests.trainer.vision import (
    DEEP_VISION,
    IMAGE_TOKEN,
    SPARSE_VISION,
    VISION,
    png,
    write_vision_model,
    write_vision_samples,
)

pytestmark = [pytest.mark.engine, pytest.mark.matrix]


DEEP = "qwen3_vl"
SPARSE = "qwen3_vl_moe"
CONFIGURATIONS = {"qwen2_5_vl": VISION, DEEP: DEEP_VISION, SPARSE: SPARSE_VISION}


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2_5_vl", 1),
        ("qwen2_5_vl", 2),
        (DEEP, 1),
        (DEEP, 2),
        (SPARSE, 2),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def family_and_workers(request) -> tuple[str, int]:
    """An engine of one worker, or of two that share the tower, too."""
    return request.param


@pytest.fixture(scope="module")
def seeing_model(family_and_workers, tmp_path_factory) -> Path:
    hf = CONFIGURATIONS[family_and_workers[0]]
    return Path(write_vision_model(tmp_path_factory.mktemp("vision") / "model", seed=3, hf=hf))


@pytest.fixture(scope="module")
def server(family_and_workers, seeing_model, tmp_path_factory):
    options = DUMMY | {"tensor_parallel_size": family_and_workers[1]}
    found = Server.start("vision", seeing_model, tmp_path_factory.mktemp("logs"), **options)
    try:
        found.wait()
        yield found
    finally:
        found.stop()


def prompts_of(model: Path, folder: ImageFolder) -> list[Prompt]:
    """Of no image, one, the same tokens with another one, and two."""
    settings = ImageSettings.of_model(read_config(model))
    prompts = []
    for number, sizes in enumerate([[], [(90, 60)], [(90, 60)], [(28, 28), (200, 150)]]):
        ids = [5, 6]
        images = []
        for place, (width, height) in enumerate(sizes):
            rows, columns = settings.tokens_of(width, height)
            digest = folder.keep(png(width, height, 10 * number + place))
            ids.append(92)
            images.append(PromptImage(digest, len(ids), rows, columns))
            ids += [IMAGE_TOKEN] * (rows * columns)
            ids += [93, 7]
        prompts.append(Prompt(f"p{number}", "d", "", tuple(ids), "", images=tuple(images)))
    return prompts


@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_engine_and_trainer_agree_about_images(server, seeing_model, world2, tmp_path, tower):
    """From weights at random on: everything that the engine sees with was sent to it. It is asked
    about the same images again after the tower has changed, and must not remember what it made of
    them before."""
    run_dir = RunDir(tmp_path)
    prompts = prompts_of(seeing_model, ImageFolder(run_dir.images))
    samples = write_vision_samples(tmp_path / "step_000000", str(seeing_model))
    layout = {"pipeline_parallel_size": 2, "vision_tower": tower}

    async def run():
        async with publishing(world2, seeing_model, [server], tmp_path, layout=layout) as (
            publisher,
            trainer,
            clients,
        ):
            settings = ImageSettings.of_model(read_config(seeing_model))
            publisher._images = EngineImages(ImageFolder(run_dir.images), settings)

            async def assert_agree() -> None:
                found = await publisher.check_logprobs(prompts)
                assert 0 < found["canary/abs_mean"] <= found["canary/abs_max"] <= TOLERANCE

            await publisher.publish(1)
            await assert_agree()
            await trainer.call(train_request(samples, 0, num_updates=1))
            differ = pytest.MonkeyPatch()
            with differ.context() as patch:
                patch.setattr("tests.integration.test_publish.PROMPTS", prompts)
                await assert_differ(publisher)
            await publisher.publish(2)
            await assert_agree()
            first, second = prompts[1:3]
            asked = []
            for prompt in (first, second):
                images = publisher._images.of(prompt.images)
                asked += await clients[0].generate(
                    prompt.token_ids, images=images, max_tokens=4, temperature=0.0
                )
            assert not np.array_equal(asked[0].logprobs, asked[1].logprobs)

    asyncio.run(run())


def test_the_sizes_of_videos_are_those_of_transformers():
    """Which loads the class without torchvision, but makes none of it."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    from grpo_megatron.rollout.plugin.cpu_without_torchvision import _NoVideos

    assert _NoVideos.size == Qwen3VLVideoProcessor.size
    assert _NoVideos.temporal_patch_size == Qwen3VLVideoProcessor.temporal_patch_size


def test_vllm_reads_the_items_that_are_sent(tmp_path):
    from grpo_megatron.rollout.plugin import cpu_without_torchvision

    cpu_without_torchvision.apply()
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    folder = ImageFolder(tmp_path)
    settings = ImageSettings(14, 2, 2, 784, 50176, (0.0,) * 3, (1.0,) * 3, 1.0)
    content = png(60, 30, 0)
    image = PromptImage(folder.keep(content), 3, 1, 2)
    (found,) = EngineImages(folder, settings).of([image])
    item = decode_mm_kwargs_item(found.item)
    assert item["image_grid_thw"].data.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(
        item["pixel_values"].data.numpy(), patches_of(content, 1, 2, settings)
    )
    assert msgspec.json.encode(found.item)
