"""Images of rows: where they are found, how they get into prompts, and what is refused by name."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.prompt_images import ImageReader
from grpo_megatron.data.prompts import load_prompts, load_splits, make_splits
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.images import digest_of
from grpo_megatron.launch.bindings import refuse_unreadable_problems
from grpo_megatron.plan.resolve import resolve
from tests.trainer.vision import png

REWARDS = [{"function": "grpo_megatron.rewards.functions:exact_match"}]
SMALL = png(60, 30, 0)  # one row of two tokens
TALL = png(28, 84, 1)  # three rows of one token


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, load_preset("tiny-qwen2.5-vl"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(model) -> TextTokenizer:
    return load_tokenizer(model)


@pytest.fixture
def reader(model, tokenizer, tmp_path) -> ImageReader:
    found = ImageReader.of_model(model, tokenizer, ImageFolder(tmp_path / "kept").keep)
    assert found is not None
    return found


def domain_of(path: Path, **settings) -> DomainConfig:
    values = {"name": "see", "source": "file", "path": str(path), "rewards": REWARDS}
    return DomainConfig.model_validate(values | settings)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_every_way_to_give_an_image(tmp_path, tokenizer, reader):
    """A path beside the file, bytes and path of Parquet, a data: URI; one or a list of them."""
    (tmp_path / "small.png").write_bytes(SMALL)
    uri = "data:image/png;base64," + base64.b64encode(SMALL).decode()
    rows = [
        {"question": "1?", "answer": "1", "images": ["small.png"]},
        {"question": "2?", "answer": "1", "images": "small.png"},
        {"question": "3?", "answer": "1", "images": [uri]},
        {"question": "4?", "answer": "1"},
        {"question": "7?", "answer": "1", "images": ""},
        {"question": "8?", "answer": "1", "images": [{"bytes": list(SMALL), "path": None}]},
    ]
    prompts = load_prompts(domain_of(write_rows(tmp_path / "a.jsonl", rows)), 0, tokenizer, reader)
    table = pa.Table.from_pylist(
        [
            {"question": "5?", "answer": "1", "images": [{"bytes": SMALL, "path": "any"}]},
            {"question": "6?", "answer": "1", "images": [{"bytes": None, "path": "small.png"}]},
        ]
    )
    pq.write_table(table, tmp_path / "b.parquet")
    prompts += load_prompts(domain_of(tmp_path / "b.parquet"), 0, tokenizer, reader)
    digest = digest_of(SMALL)
    assert ImageFolder(tmp_path / "kept").read(digest) == SMALL
    for prompt in (*prompts[:3], *prompts[5:]):
        (image,) = prompt.images
        assert (image.digest, image.rows, image.columns) == (digest, 1, 2)
        assert prompt.text.startswith("<|vision_start|><|image_pad|><|vision_end|>")
        assert "images" not in prompt.metadata
    assert [(prompt.images, prompt.text) for prompt in prompts[3:5]] == [((), "4?"), ((), "7?")]


def test_images_take_their_tokens_where_the_question_marks_them(tmp_path, tokenizer, reader):
    (tmp_path / "small.png").write_bytes(SMALL)
    (tmp_path / "tall.png").write_bytes(TALL)
    row = {
        "question": "a<image>b<image>c",
        "answer": "1",
        "images": ["small.png", "tall.png"],
    }
    domain = domain_of(write_rows(tmp_path / "a.jsonl", [row]))
    (prompt,) = load_prompts(domain, 0, tokenizer, reader)
    start, pad, end = tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")
    a, b, c = tokenizer.encode("abc")
    assert prompt.token_ids == (a, start, pad, pad, end, b, start, pad, pad, pad, end, c)
    places = [(image.start, image.rows, image.columns) for image in prompt.images]
    assert places == [(2, 1, 2), (7, 3, 1)]


def test_prompts_of_one_text_and_two_images_are_two(tmp_path, tokenizer, reader):
    for name, content in (("one.png", SMALL), ("other.png", png(60, 30, 5))):
        (tmp_path / name).write_bytes(content)
    rows = []
    for name in ("one.png", "other.png", "one.png"):
        rows.append({"question": "How many?", "answer": "1", "images": [name]})
    domain = domain_of(write_rows(tmp_path / "a.jsonl", rows))
    prompts = load_prompts(domain, 0, tokenizer, reader)
    assert len({prompt.prompt_id for prompt in prompts}) == 2
    splits = make_splits(prompts, num_heldout=0, num_validation=0)
    assert (len(splits.train["see"]), splits.num_duplicates) == (2, 1)


BAD = {
    "broken": ({"images": ["broken.png"]}, "not a readable image"),
    "missing": ({"images": ["absent.png"]}, "no image at"),
    "oblong": ({"images": ["oblong.png"]}, "more than 200 times"),
    "remote": ({"images": ["https://example.org/a.png"]}, "loads nothing from the network"),
    "signed": ({"images": [f"https://example.org/a?{'s' * 400}"]}, "s… (422 characters)'"),
    "number": ({"images": [17]}, "an image is int, expected a path"),
    "uri": ({"images": ["data:image/png;base64,@@"]}, "an image is no base 64"),
    "plain_uri": ({"images": ["data:text/plain,abc"]}, "expected data:image"),
    "base_64": (
        {"images": [{"bytes": "iVBORw0KGgo=", "path": None}]},
        "an image are str, expected",
    ),
    "count": ({"images": [{"bytes": 5}]}, "an image are int, expected bytes or a list of numbers"),
    "numbers": ({"images": [{"bytes": [137, 256]}]}, "numbers from 0 to 255"),
    "nul": ({"images": ["a\0b.png"]}, "no image at"),
    "base64": ({"images": [base64.b64encode(bytes(300)).decode()]}, "A… (400 characters)"),
    "no_path": ({"images": [{"bytes": None, "path": ""}]}, "a table with neither bytes nor a path"),
    "path_only": ({"images": {"path": ""}}, "a table with neither bytes nor a path"),
    "nothing": ({"images": {}}, "a table with neither bytes nor a path"),
    "empty": ({"images": ["", "small.png"]}, "an image is an empty text in a list"),
    "file_of_host": ({"images": ["file://small.png"]}, "no whole path of this machine"),
    "file_of_folder": ({"images": ["file:small.png"]}, "no whole path of this machine"),
    "file_absent": ({"images": ["file:///absent/a.png"]}, "no image at /absent/a.png"),
    "token": ({"question": "what is <|image_pad|>?", "images": ["small.png"]}, "only images may"),
    "token_alone": ({"question": "what is <|image_pad|>?", "images": None}, "only images may have"),
    "marks": ({"question": "<image><image>?", "images": ["small.png"]}, "2 <image> for 1 images"),
    "marker": (
        {"question": "<|vision_start|><|image_pad|><|vision_end|>?", "images": ["small.png"]},
        "which only images may have",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_cannot_be_seen_is_left_out_by_name(tmp_path, tokenizer, reader, caplog, name):
    """The others stay."""
    (tmp_path / "small.png").write_bytes(SMALL)
    (tmp_path / "broken.png").write_bytes(SMALL[:200])
    (tmp_path / "oblong.png").write_bytes(png(3000, 10, 0))
    fields, words = BAD[name]
    good = {"question": "How many?", "answer": "1", "images": ["small.png"]}
    path = write_rows(tmp_path / "a.jsonl", [good, good | fields])
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(domain_of(path), 0, tokenizer, reader)
    assert len(prompts) == 1
    assert f"{path}:2: left out: " in caplog.text and words in caplog.text
    assert "1 of 2 rows are left out" in caplog.text
    assert reader.num_refused == {"see": 1}
    alone = write_rows(tmp_path / "b.jsonl", [good | fields])
    with pytest.raises(DataError, match=r"b\.jsonl:1"):
        load_prompts(domain_of(alone), 0, tokenizer, reader)


@pytest.mark.parametrize("begin", ["file://", "file://localhost", "file:"])
def test_a_file_uri_is_a_path(tmp_path, tokenizer, reader, begin):
    """Also beside bytes that are none; marks of percent and number signs stay themselves."""
    (tmp_path / "a b#c?.png").write_bytes(SMALL)
    uri = f"{begin}{tmp_path}/a%20b#c?.png"
    rows = [
        {"question": "1?", "answer": "1", "images": [uri]},
        {"question": "2?", "answer": "1", "images": {"bytes": None, "path": uri}},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    prompts = load_prompts(domain_of(path), 0, tokenizer, reader)
    assert [prompt.images[0].digest for prompt in prompts] == 2 * [digest_of(SMALL)]


def test_base_64_in_a_table_is_told_where_it_goes(tmp_path, tokenizer, reader):
    row = {"question": "?", "answer": "1", "images": {"bytes": base64.b64encode(SMALL).decode()}}
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=r"data:image/png;base64,…") as error:
        load_prompts(domain_of(path), 0, tokenizer, reader)
    assert error.value.where == f"{path}:1"


def test_a_field_of_the_template_with_an_image_token_is_told_by_row(tmp_path, tokenizer, reader):
    row = {"question": "?", "answer": "1", "note": "<|image_pad|>"}
    path = write_rows(tmp_path / "a.jsonl", [row])
    domain = domain_of(path, template="{metadata[note]} {question}")
    with pytest.raises(DataError, match="1 image tokens for 0 images") as error:
        load_prompts(domain, 0, tokenizer, reader)
    assert error.value.where == f"{path}:1"


def test_a_mark_of_the_template_is_refused(tmp_path, tokenizer, reader):
    """It would be text, and the image elsewhere."""
    (tmp_path / "small.png").write_bytes(SMALL)
    row = {"question": "How many?", "answer": "1", "images": "small.png"}
    path = write_rows(tmp_path / "a.jsonl", [row])
    domain = domain_of(path, template="Look <image>: {question}")
    with pytest.raises(DataError, match="adds <image>, which would stay as text") as error:
        load_prompts(domain, 0, tokenizer, reader)
    assert error.value.where == f"{path}:1"
    assert "into the questions of rows" in error.value.remedy


def test_splits_say_how_many_rows_were_refused(tmp_path, tokenizer, reader):
    (tmp_path / "small.png").write_bytes(SMALL)
    rows = []
    for number in range(5):
        name = "small.png" if number % 2 else "absent.png"
        rows.append({"question": f"Is it {number}?", "answer": "1", "images": [name]})
    path = write_rows(tmp_path / "a.jsonl", rows)
    flags = ["domains.0.source=file", f"domains.0.path={path}", "domains.0.arguments={}"]
    flags += ["domains.0.num_problems=null", "data.num_validation=0", "data.num_heldout=0"]
    flags += ["cold_start=null"]
    config = resolve("demo/vision-count-cpu", flags).config
    splits = load_splits(config, tokenizer, reader)
    assert splits.num_refused == {"count": 3}
    assert len(splits.train["count"]) == 2
    kept = write_rows(tmp_path / "b.jsonl", rows[1:2])
    config = resolve("demo/vision-count-cpu", [*flags, f"domains.0.path={kept}"]).config
    assert load_splits(config, tokenizer, reader).num_refused == {"count": 0}


def _recipe_of(path: Path, *flags: str) -> RunConfig:
    settings = ["domains.0.source=file", f"domains.0.path={path}", "domains.0.arguments={}"]
    settings += ["domains.0.num_problems=null", "data.num_validation=0", "data.num_heldout=0"]
    settings += ["cold_start=null"]
    return resolve("demo/vision-count-cpu", [*settings, *flags]).config


def test_a_named_field_of_images_that_no_row_has_is_refused(tmp_path, tokenizer, reader):
    """Before anything starts, too; one row that has it is enough."""
    (tmp_path / "small.png").write_bytes(SMALL)
    plain = {"question": "1?", "answer": "1"}
    path = write_rows(tmp_path / "a.jsonl", [plain, plain | {"image": "small.png"}])
    config = _recipe_of(path, "domains.0.image_field=imgae")
    for check in (refuse_unreadable_problems, lambda run: load_splits(run, tokenizer, reader)):
        with pytest.raises(DataError, match="no row of domain 'count' has the field") as caught:
            check(config)
        assert caught.value.where == f"{path}:1"
        assert "did you mean 'image'?" in caught.value.remedy
    config = _recipe_of(path, "domains.0.image_field=image")
    refuse_unreadable_problems(config)
    assert len(load_splits(config, tokenizer, reader).train["count"]) == 2
    text_only = resolve("demo/gspo-moe-cpu", ["domains.0.image_field=imgae"]).config
    refuse_unreadable_problems(text_only)


def test_rows_without_the_default_field_of_images_are_told(tmp_path, tokenizer, reader, caplog):
    row = {"question": "1?", "answer": "1", "image": "small.png"}
    config = _recipe_of(write_rows(tmp_path / "a.jsonl", [row]))
    with caplog.at_level(logging.WARNING):
        load_splits(config, tokenizer, reader)
    assert "no row of domain 'count' has images, in the field 'images'" in caplog.text
    assert "other fields there: image" in caplog.text


def test_paths_begin_in_the_folder_that_the_recipe_names(tmp_path, tokenizer, reader):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "small.png").write_bytes(SMALL)
    path = write_rows(
        tmp_path / "a.jsonl", [{"question": "?", "answer": "1", "images": "small.png"}]
    )
    with pytest.raises(DataError, match="set image_folder"):
        load_prompts(domain_of(path), 0, tokenizer, reader)
    (prompt,) = load_prompts(domain_of(path, image_folder=str(folder)), 0, tokenizer, reader)
    assert len(prompt.images) == 1


def test_a_conversation_has_markers_in_its_messages(model, tmp_path, reader):
    """Where they are marked, else before what the user says last."""
    template = "{% for m in messages %}{{ m['content'] }}.{% endfor %}"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    other = tmp_path / "chat"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    (tmp_path / "small.png").write_bytes(SMALL)
    marker = reader.marker
    rows = []
    for first, last in (("a<image>", "b"), ("a", "b")):
        messages = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": last},
        ]
        rows.append({"messages": messages, "answer": "1", "images": ["small.png"]})
    domain = domain_of(write_rows(tmp_path / "a.jsonl", rows), template="chat")
    prompts = load_prompts(domain, 0, load_tokenizer(other), reader)
    assert [prompt.text for prompt in prompts] == [f"a{marker}.c.b.", f"a.c.{marker}b."]


def test_a_model_that_reads_text_only_has_no_reader(tmp_path):
    write_tiny_model(tmp_path / "text", load_preset("tiny-qwen3-moe"))
    tokenizer = load_tokenizer(tmp_path / "text")
    assert ImageReader.of_model(tmp_path / "text", tokenizer) is None
    row = {"question": "How many?", "answer": "1", "images": ["absent.png"]}
    (prompt,) = load_prompts(domain_of(write_rows(tmp_path / "a.jsonl", [row])), 0, tokenizer)
    assert prompt.images == ()
    marked = write_rows(tmp_path / "b.jsonl", [row | {"question": "<image>How many?"}])
    with pytest.raises(DataError, match="the model sees none"):
        load_prompts(domain_of(marked), 0, tokenizer)
