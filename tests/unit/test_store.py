"""The model store with small real model folders: names, damage, space, kills, concurrency."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from legato_deploy.store import (
    ModelStore,
    StoredModel,
    StoreError,
    console_progress,
    default_root,
    pull,
)
from rich.console import Console
from safetensors.numpy import save_file

PACKAGE_PATH = str(Path(__file__).parents[2] / "deploy")
CATALOGUE_NAME = "smollm2-135m-instruct"


class Said:
    """A progress that keeps what it is told and can act when a stage begins."""

    def __init__(self, on_stage: Callable[[str], None] = lambda _: None) -> None:
        self.lines: list[str] = []
        self.stages: list[list[int]] = []  # announced and done bytes
        self._on_stage = on_stage

    def stage(self, title: str, num_bytes: int) -> None:
        self.stages.append([num_bytes, 0])
        self._on_stage(title)

    def advance(self, num_bytes: int) -> None:
        self.stages[-1][1] += num_bytes

    def say(self, text: str) -> None:
        self.lines.append(text)


def write_model(folder: Path, *, seed: int = 0, num_values: int = 1000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    values = np.random.default_rng(seed).standard_normal(num_values, dtype=np.float32)
    save_file({"w": values}, folder / "model.safetensors")
    return folder


def python(script: str, *arguments: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": PACKAGE_PATH, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "legato")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "src" / "Tiny-1.5")


@pytest.fixture
def stored(store: ModelStore, folder: Path) -> StoredModel:
    return pull(store, str(folder), Said())


def left_in(store: ModelStore) -> list[str]:
    return sorted(path.name for path in store.models.iterdir()) if store.models.exists() else []


# --- pulling a folder


def test_folder_is_copied_whole_and_found_by_its_name(store: ModelStore, folder: Path) -> None:
    (folder / "notes.txt").write_text("not part of a model")
    said = Said()
    model = pull(store, str(folder), said)
    assert model.name == "tiny-1.5" and model.path == store.root / "models" / "tiny-1.5"
    assert {path.name for path in model.path.iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors", "legato.json"),
    }
    weights = model.path / "model.safetensors"
    assert weights.read_bytes() == (folder / "model.safetensors").read_bytes()
    assert weights.stat().st_ino != (folder / "model.safetensors").stat().st_ino
    assert store.list() == [model] == [store.get("tiny-1.5")] == [store.verify("tiny-1.5")]
    assert model.num_bytes == sum(
        path.stat().st_size for path in model.path.iterdir() if path.name != "legato.json"
    )
    assert all(announced == done > 0 for announced, done in said.stages)
    manifest = json.loads((model.path / "legato.json").read_text())
    assert manifest["source"] == str(folder) and manifest["created_by"].startswith("legato ")


def test_second_pull_changes_nothing_and_says_so(
    store: ModelStore, folder: Path, stored: StoredModel
) -> None:
    before = stored.path.stat()
    said = Said()
    assert pull(store, str(folder), said) == stored
    assert "already" in said.lines[0] and said.stages == []
    assert stored.path.stat().st_ino == before.st_ino


def test_present_model_is_found_in_a_store_that_cannot_be_written(
    store: ModelStore, folder: Path, stored: StoredModel
) -> None:
    (store.root / "pull.lock").unlink()
    assert pull(store, str(folder), Said()) == stored
    assert not (store.root / "pull.lock").exists()  # nothing was opened for writing


def test_other_content_under_a_taken_name_is_refused_and_fits_under_another(
    store: ModelStore, tmp_path: Path, stored: StoredModel
) -> None:
    other = write_model(tmp_path / "b" / "tiny-1.5", seed=1)
    with pytest.raises(StoreError, match=r"another model called tiny-1.5"):
        pull(store, str(other), Said())
    second = pull(store, str(other), Said(), name="tiny-b")
    assert [model.name for model in store.list()] == ["tiny-1.5", "tiny-b"]
    assert second.fingerprint != stored.fingerprint


def test_fingerprint_is_of_content_not_of_place_or_name(
    store: ModelStore, folder: Path, tmp_path: Path, stored: StoredModel
) -> None:
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    in_place = store.resolve(str(moved))
    assert in_place.path == moved
    assert (in_place.fingerprint, in_place.num_bytes) == (stored.fingerprint, stored.num_bytes)
    (moved / "tokenizer_config.json").write_text("{}")
    assert store.resolve(moved).fingerprint != stored.fingerprint


def test_resolve_takes_names_paths_and_paths_into_the_store(
    store: ModelStore, folder: Path, stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.resolve("tiny-1.5") == store.resolve(str(stored.path)) == stored
    monkeypatch.chdir(folder.parent)
    write_model(Path("local"))
    assert store.resolve("local").path == folder.parent / "local"
    for unknown in ("nowhere", "./nowhere", "nul\0"):
        with pytest.raises(StoreError):
            store.resolve(unknown)


def test_sharded_weights_come_with_their_index(store: ModelStore, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shards = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    for key, name in shards.items():
        save_file({key: np.ones(3, np.float32)}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    model = pull(store, str(folder), Said())
    assert {*shards.values(), index.name} <= {path.name for path in model.path.iterdir()}
    (folder / shards["b"]).unlink()
    with pytest.raises(StoreError, match="model-2-of-2"):
        store.resolve(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(StoreError, match="another folder"):
        store.resolve(folder)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "model_type"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "not JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_bytes(b"\xff"), "not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 2000), "cut short"),
        (lambda f: os.truncate(f / "model.safetensors", 0), "cut short"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "damaged"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pickle weights only \\(pytorch_model.bin\\)",
        ),
        (lambda f: (f / "model.safetensors").rename(f / "consolidated.pt"), "pickle"),
    ],
)
def test_folder_that_is_no_whole_model_is_refused(
    store: ModelStore, folder: Path, break_it: Callable[[Path], object], says: str
) -> None:
    break_it(folder)
    with pytest.raises(StoreError, match=says):
        pull(store, str(folder), Said())
    with pytest.raises(StoreError, match=says):
        store.resolve(str(folder))
    assert left_in(store) == []


def test_pickle_beside_safetensors_is_left_behind(store: ModelStore, folder: Path) -> None:
    """B110"""
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    model = pull(store, str(folder), Said())
    assert not list(model.path.glob("*.bin"))


def test_class_map_in_a_config_is_never_imported(store: ModelStore, folder: Path) -> None:
    """B112: neither by pull nor resolve, nor by a loader that is told not to trust."""
    marker = folder / "marker"
    (folder / "evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig\nclass Evil(LlamaConfig): pass\n"
    )
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    in_place, model = store.resolve(str(folder)), pull(store, str(folder), Said())
    assert not list(model.path.glob("*.py"))
    from transformers import AutoConfig

    for path in (in_place.path, model.path):
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        assert type(loaded).__module__.startswith("transformers.")
    assert not marker.exists() and "evil" not in sys.modules


# --- names


BAD_NAMES = [
    *("", ".", "..", "../../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 97, "x" * 5000),
    *(
        ".aside-x",
        "Tiny",
        "tiny ",
        "tiny\n",
        "-tiny",
        "tiny-",
        "ti ny",
        "tïny",
        "~",
        "*",
        "pull.lock/",
    ),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_name_is_a_key_never_a_path(
    store: ModelStore, folder: Path, stored: StoredModel, name: str
) -> None:
    """B115"""
    (store.root / "x").mkdir()
    with pytest.raises(StoreError, match="not a model name"):
        store.get(name)
    with pytest.raises(StoreError, match="not a model name"):
        store.verify(name)
    with pytest.raises(StoreError, match="not a model name"):
        pull(store, str(folder), Said(), name=name)
    assert left_in(store) == ["tiny-1.5"]


def test_link_in_the_store_is_no_model(store: ModelStore, stored: StoredModel) -> None:
    """B115: not as a model's folder, nor as a file of one."""
    os.symlink(stored.path, store.models / "linked")
    with pytest.raises(StoreError, match="is a link"):
        store.get("linked")
    assert [model.name for model in store.list()] == ["tiny-1.5"]
    weights = stored.path / "model.safetensors"
    weights.rename(store.root / "outside")
    os.symlink(store.root / "outside", weights)
    with pytest.raises(StoreError, match=r"damaged: model.safetensors"):
        store.get("tiny-1.5")
    (store.root / "outside").rename(weights)
    tokenizer = stored.path / "tokenizer.json"
    length = tokenizer.stat().st_size
    tokenizer.unlink()
    os.symlink("x" * length, tokenizer)  # a link's size is that of its text
    with pytest.raises(StoreError, match=r"damaged: tokenizer.json"):
        store.get("tiny-1.5")


@pytest.mark.parametrize("target", ["../../../../etc/hostname", "/etc/hostname"])
def test_manifest_cannot_point_outside_its_folder(
    store: ModelStore, stored: StoredModel, target: str
) -> None:
    path = stored.path / "legato.json"
    manifest = json.loads(path.read_text())
    manifest["files"][0]["name"] = target
    path.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"no model tiny-1.5"):
        store.get("tiny-1.5")


def test_unknown_name_tells_what_there_is(store: ModelStore, stored: StoredModel) -> None:
    with pytest.raises(StoreError, match=r"Here: tiny-1.5.*legato pull"):
        store.get("nothing")
    with pytest.raises(StoreError, match=f"legato pull {CATALOGUE_NAME}"):
        store.get(CATALOGUE_NAME)
    with pytest.raises(StoreError, match=CATALOGUE_NAME):
        pull(store, "nothing", Said())
    with pytest.raises(StoreError, match="no folder"):
        pull(store, "/no/such/folder", Said())


def test_catalogue_names_are_kept(store: ModelStore, tmp_path: Path) -> None:
    own = write_model(tmp_path / CATALOGUE_NAME)
    with pytest.raises(StoreError, match="kept for the catalogue"):
        pull(store, str(own), Said())
    with pytest.raises(StoreError, match="keeps its name"):
        pull(store, CATALOGUE_NAME, Said(), name="mine")


def test_root_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEGATO_HOME", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("LEGATO_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "legato"


# --- damage and repair


def test_one_flipped_bit_is_found_by_verify(store: ModelStore, stored: StoredModel) -> None:
    weights = stored.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert store.get("tiny-1.5") == stored  # by size it is whole
    with pytest.raises(StoreError, match=r"content of model.safetensors has changed.*rm -r"):
        store.verify("tiny-1.5")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "tokenizer.json").unlink(),
        lambda path: os.truncate(path / "model.safetensors", 100),
        lambda path: (path / "legato.json").unlink(),
        lambda path: (path / "legato.json").write_text("{"),
        lambda path: (path / "legato.json").write_text('{"name": 3}'),
        lambda path: (path / "legato.json").write_text("[]"),
        lambda path: [file.unlink() for file in path.iterdir()],
    ],
)
def test_damaged_model_is_refused_left_out_and_repaired_by_pull(
    store: ModelStore, folder: Path, stored: StoredModel, damage: Callable[[Path], object]
) -> None:
    damage(stored.path)
    with pytest.raises(StoreError):
        store.get("tiny-1.5")
    assert store.list() == []
    said = Said()
    assert pull(store, str(folder), said) == stored == store.verify("tiny-1.5")
    assert "damaged" in said.lines[0]
    assert left_in(store) == ["tiny-1.5"]


# --- interruption, space, concurrency


def test_ctrl_c_leaves_nothing_and_says_how_to_go_on(store: ModelStore, folder: Path) -> None:
    said = Said(lambda title: signal.raise_signal(signal.SIGINT) if "finger" in title else None)
    with pytest.raises(StoreError, match=f"start again with: legato pull {folder}") as caught:
        pull(store, str(folder), said)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert left_in(store) == []
    assert pull(store, str(folder), Said()) == store.verify("tiny-1.5")


DIES = """
    import os, pathlib, signal, sys
    from legato_deploy.store import ModelStore, pull
    class Dies:
        def stage(self, title, num_bytes):
            if "fingerprint" in title: os.kill(os.getpid(), signal.SIGKILL)
        def advance(self, num_bytes): pass
        def say(self, text): pass
    pull(ModelStore(pathlib.Path(sys.argv[1])), sys.argv[2], Dies())
"""


def test_killed_pull_is_not_a_model_and_the_next_one_cleans_up(
    store: ModelStore, folder: Path, tmp_path: Path
) -> None:
    assert python(DIES, store.root, folder).wait() == -signal.SIGKILL
    assert left_in(store) == [".aside-tiny-1.5"] and store.list() == []
    other = write_model(tmp_path / "other", seed=2)
    pull(store, str(other), Said())
    assert left_in(store) == ["other"]


def test_pull_waits_for_the_one_at_work_then_finds_its_model(
    store: ModelStore, folder: Path
) -> None:
    store.root.mkdir()
    said = Said()
    with (store.root / "pull.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=pull, args=(store, str(folder), said))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and "waiting" in said.lines[0]
        assert store.list() == []
    thread.join(10)
    assert [model.name for model in store.list()] == ["tiny-1.5"]


PULLS = """
    import pathlib, sys
    from legato_deploy.store import ModelStore, pull, console_progress
    from rich.console import Console
    with console_progress(Console()) as progress:
        pull(ModelStore(pathlib.Path(sys.argv[1])), sys.argv[2], progress)
"""


def test_pulls_in_many_processes_store_it_once(store: ModelStore, tmp_path: Path) -> None:
    big = write_model(tmp_path / "big", num_values=5_000_000)
    pulls = [python(PULLS, store.root, big) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in pulls]
    assert [process.returncode for process in pulls] == [0] * 4, outputs
    assert sum("is ready" in output for output in outputs) == 1
    assert sum("already" in output for output in outputs) == 3
    store.verify("big")
    assert left_in(store) == ["big"]


def test_too_little_space_is_told_before_anything_is_written(
    store: ModelStore, folder: Path
) -> None:
    num_bytes = 1 << 42  # sparse: takes no room here, and more than there is when copied
    header = {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    weights = folder / "model.safetensors"
    weights.write_bytes(len(head).to_bytes(8, "little") + head)
    try:
        os.truncate(weights, 8 + len(head) + num_bytes)
    except OSError as error:
        pytest.skip(f"no file of 4 TiB on this file system: {error}")
    if shutil.disk_usage(folder).free > num_bytes:
        pytest.skip("this disk has room for 4 TiB")

    def stop(title: str) -> None:  # rather than fill this disk, should the check be lost
        raise AssertionError(title)

    said = Said(stop)
    with pytest.raises(StoreError, match=r"needs 4,398,\d+ MB and .* free.*LEGATO_HOME"):
        pull(store, str(folder), said)
    assert said.stages == [] and left_in(store) == []


FILLS_THE_DISK = """
    import os, pathlib, sys
    from legato_deploy.store import ModelStore, StoreError, pull
    root = pathlib.Path(sys.argv[1])
    class Neighbour:  # another program fills the disk while the pull copies
        def stage(self, title, num_bytes):
            with open(root / "filler", "wb", buffering=0) as file:
                try:
                    while True: file.write(b"x" * 65536)
                except OSError: pass
        def advance(self, num_bytes): pass
        def say(self, text): pass
    store = ModelStore(root)
    try: pull(store, sys.argv[2], Neighbour())
    except StoreError as error: print(error)
    print(list(store.models.iterdir()))
    os.unlink(root / "filler")
    Neighbour.stage = lambda *_: None
    print(pull(store, sys.argv[2], Neighbour()) == store.verify("tiny-1.5"))
"""


def test_disk_that_fills_up_meanwhile(folder: Path, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace for a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = 'mount -t tmpfs -o size=80m none "$1" && exec "$2" -c "$3" "$1" "$4"'
    script = textwrap.dedent(FILLS_THE_DISK)
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mounted, "sh", disk, sys.executable, script, folder],
        env={**os.environ, "PYTHONPATH": PACKAGE_PATH},
        capture_output=True,
        text=True,
    )
    message, left, recovered = done.stdout.splitlines()
    assert "No space left" in message and "LEGATO_HOME" in message and "Nothing was" in message
    assert (left, recovered) == ("[]", "True")


def test_store_that_cannot_be_made_says_where(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Nothing was stored"):
        pull(ModelStore(tmp_path / "file" / "legato"), str(folder), Said())


# --- progress and imports


def test_plain_lines_where_there_is_no_terminal(
    store: ModelStore, folder: Path, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as log, console_progress(Console(file=log)) as progress:
        pull(store, str(folder), progress)
    text = (tmp_path / "log").read_text()
    assert "\x1b" not in text and "\r" not in text
    assert [line.split(" ")[0] for line in text.splitlines()] == [
        *("Copying", "Computing", "tiny-1.5")
    ]


def test_bars_on_a_terminal(store: ModelStore, folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        console = Console(file=log, force_terminal=True, width=200)
        with console_progress(console) as progress:
            pull(store, str(folder), progress)
    text = (tmp_path / "log").read_text()
    assert "\x1b[" in text and "Copying the" in text and "tiny-1.5 is ready" in text


def test_a_long_stage_says_how_far_it_is_but_not_too_often() -> None:
    from legato_deploy.store.progress import LineProgress

    now_s, lines = 0.0, list[str]()
    progress = LineProgress(lines.append, clock=lambda: now_s)
    progress.stage("Downloading", 100_000_000)
    for _ in range(100):
        now_s += 0.25
        progress.advance(1_000_000)
    assert lines[0] == "Downloading (100 MB)"
    assert lines[1:] == [f"Downloading: {percent}%" for percent in (20, 40, 60, 80, 100)]


def test_store_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'gguf', 'numpy', 'huggingface_hub', 'rich'}"
    script = f"import sys, legato_deploy.store; print({heavy} & set(sys.modules))"
    assert python(script).communicate()[0] == "set()\n"
