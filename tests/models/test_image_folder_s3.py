"""Image folders at s3:// URLs, on a loopback server: reading, errors, and credentials that stay secret."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from PIL import Image

from gangline.models.data.datasets import image_folder, raw_digits
from gangline.models.data.images.folder import ImageFolder
from gangline.models.data.sources import source

# botocore and moto use functions that newer Pythons deprecate.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

KEY, SECRET = "gangline-test-key", "gangline/test/secret/value"
SHAPE = (1, 8, 8)
NAMES = {1: "one", 0: "zero"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start an S3 server and yield its address."""
    pytest.importorskip("s3fs", reason="needs s3fs: pip install gangline[s3]")
    moto_server = pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[server]'")
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set the environment for the server; make a bucket of ten digits in which one image is damaged."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "FSSPEC_S3_KEY", "FSSPEC_S3_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    files = fsspec.filesystem("s3")
    if not files.exists("pictures"):
        files.mkdir("pictures")
        levels, labels = raw_digits()
        for digit, name in NAMES.items():
            for number, image in enumerate(levels[labels == digit][:5]):
                content = BytesIO()
                Image.fromarray((image * 15).numpy()).save(content, "PNG")
                files.pipe(f"pictures/train/{name}/{number}.png", content.getvalue())
        files.pipe("pictures/train/one/2.png", b"no image")
        files.pipe("pictures/notes.txt", b"no class")
    return files


@pytest.fixture
def anew() -> Iterator[None]:
    """Drop file systems that were opened with other credentials."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def told(caught: pytest.ExceptionInfo[BaseException], caplog: pytest.LogCaptureFixture) -> str:
    """Return everything of an error that a user or a log could see."""
    return "".join(traceback.format_exception(caught.value)) + caplog.text


def test_a_bucket_is_read_like_a_folder(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        dataset = ImageFolder("s3://pictures/train", SHAPE, skip_unreadable=1)
        assert dataset.classes == ["one", "zero"]
        assert dataset.labels == [0] * 5 + [1] * 5
        assert dataset.files[0] == "s3://pictures/train/one/0.png"
        batches = list(source(dataset, 4, shuffle=False, seed=0).epoch(0))
    assert [labels.tolist() for _, labels in batches] == [[0, 0, 0], [0, 1, 1, 1], [1, 1]]
    first_zero = raw_digits()[0][0] * 15 / 255
    assert torch.equal(batches[1][0][1, 0], first_zero)
    assert [file for file, _ in dataset.skipped] == ["s3://pictures/train/one/2.png"]
    assert "s3://pictures/train/one/2.png" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET.encode() not in pickle.dumps(dataset)  # state sent to decoding processes


def test_an_unreadable_object_and_one_that_is_gone_are_named(store: Any) -> None:
    dataset = ImageFolder("s3://pictures/train", SHAPE)
    with pytest.raises(ValueError, match=r"image s3://pictures/train/one/2\.png cannot be read: cannot identify"):
        dataset[2]
    store.mv("pictures/train/zero/4.png", "pictures/gone.png")
    try:
        with pytest.raises(ValueError, match=r"image s3://pictures/train/zero/4\.png cannot be read"):
            dataset[9]
    finally:
        store.mv("pictures/gone.png", "pictures/train/zero/4.png")


@pytest.mark.parametrize("url", ["s3://no-such-bucket/train", "s3://no-such-bucket", "s3://pictures/validation"])
def test_a_missing_bucket_or_folder_is_named_without_secrets(
    store: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FileNotFoundError, match=f"image folder {url} does not exist") as caught:
        image_folder(url, SHAPE, torch.float32, 0)
    assert SECRET not in told(caught, caplog)
    secret = SECRET.replace("/", "-")
    with pytest.raises((FileNotFoundError, RuntimeError, ValueError)) as caught:
        ImageFolder(url.replace("s3://", f"s3://{KEY}:{secret}@"), SHAPE)
    text = told(caught, caplog)
    assert url.replace("s3://", "s3://***@") in text
    assert secret not in text


@pytest.fixture
def strict(store: Any, anew: None) -> Iterator[None]:
    """The server refuses credentials that it does not know."""
    from moto import settings
    from moto.core import responses

    before = responses.ActionAuthenticatorMixin.request_count
    limit = settings.INITIAL_NO_AUTH_ACTION_COUNT
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
    yield
    settings.INITIAL_NO_AUTH_ACTION_COUNT = limit
    responses.ActionAuthenticatorMixin.request_count = before


def test_a_wrong_credential_is_refused_and_not_shown(
    store: Any, strict: None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(RuntimeError, match="cannot be listed: PermissionError") as caught,
    ):
        ImageFolder("s3://pictures/train", SHAPE)
    text = told(caught, caplog)
    assert "s3://pictures/train" in text
    assert "AWS_SECRET_ACCESS_KEY" in text
    assert SECRET not in text
    assert KEY not in text


def test_a_credential_that_is_taken_away_ends_reading(
    store: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ImageFolder("s3://pictures/train", SHAPE, skip_unreadable=10)
    request.getfixturevalue("strict")
    with pytest.raises(RuntimeError, match="cannot be fetched: PermissionError") as caught:
        list(source(dataset, 4, shuffle=False, seed=0).epoch(0))
    assert dataset.skipped == []  # the server refused access: not an unreadable image
    assert SECRET not in told(caught, caplog)


def test_no_credentials_at_all_are_an_error_that_says_where_they_belong(
    store: Any, anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(RuntimeError, match="check that the credentials in the environment"):
        ImageFolder("s3://pictures/train", SHAPE)
