"""The explorer in a real browser: Voila serves a notebook with the widget, headless Chromium clicks, the pictures must change.

Everything stays on this machine: the browser may reach 127.0.0.1 and nothing else. Skipped, saying so, where Voila, Playwright or Chromium is absent.
"""
import contextlib, importlib.util, json, os, shutil, signal, socket, subprocess, sys, time
from pathlib import Path

import pandas as pd
import pytest

from freerep.explore import ExplorerState
from test_explore import procedures, random_index  # noqa: F401 (a fixture)

WAIT = 120          # seconds for anything that a busy machine may be slow at
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage".split()
CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
MISSING = [m for m in ("voila", "playwright", "ipykernel") if importlib.util.find_spec(m) is None] + ([] if CHROMIUM else ["chromium (Debian: apt-get install chromium)"])
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the browser test needs {', '.join(MISSING)}")


def write_notebook(path, index):
    "A notebook whose only cell shows the explorer, and a kernel of this very Python"
    import nbformat
    nb = nbformat.v4.new_notebook(metadata=dict(kernelspec=dict(name="here", display_name="here", language="python")))
    nb.cells = [nbformat.v4.new_code_cell(f"from freerep.explore import RetrievalExplorer\nfrom freerep.index import Index\nRetrievalExplorer(Index.load({str(index)!r}), k=4)")]
    nbformat.write(nb, path)


def private_jupyter(folder):
    "Settings under which Jupyter reads nothing of the user's: its own folders, and one kernel"
    kernel = folder/"data"/"kernels"/"here"
    kernel.mkdir(parents=True)
    (kernel/"kernel.json").write_text(json.dumps(dict(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name="here", language="python")))
    root = str(Path(__file__).resolve().parents[1])
    return os.environ | {f"JUPYTER_{k}_DIR": str(folder/k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")} | dict(
        JUPYTER_PREFER_ENV_PATH="0", IPYTHONDIR=str(folder/"ipython"), OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def voila(notebook, env, log):
    "The address of a running Voila; its whole process group ends with the block"
    port = free_port()
    command = [sys.executable, "-m", "voila", str(notebook), "--no-browser", f"--port={port}", "--Voila.ip=127.0.0.1"]
    with open(log, "w") as out: server = subprocess.Popen(command, env=env, cwd=notebook.parent, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url, start = f"http://127.0.0.1:{port}/", time.monotonic()
        while True:
            if server.poll() is not None or time.monotonic() - start > WAIT: pytest.fail(f"Voila did not start:\n{Path(log).read_text()[-3000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1): break
            time.sleep(.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError): os.killpg(server.pid, signal.SIGTERM)
        try: server.wait(15)
        except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL)


@contextlib.contextmanager
def browser_page():
    "A page of headless Chromium that may only reach this machine"
    from playwright.sync_api import sync_playwright
    def guard(route): route.continue_() if route.request.url.startswith("http://127.0.0.1:") else route.abort()
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=1000*WAIT)
        page = browser.new_page(viewport=dict(width=1100, height=1400))
        page.set_default_timeout(1000*WAIT)
        page.route("**/*", guard)
        try: yield page
        finally: browser.close()


# the grey in the middle of every picture that can be seen, in the order of the page; null while one is still loading
GREYS = """css => [...document.querySelectorAll(css)].filter(i => i.offsetParent).map(i => {
    if (!i.complete || !i.naturalWidth) return null;
    const c = document.createElement('canvas').getContext('2d');
    c.drawImage(i, 5, 30, 1, 1, 0, 0, 1, 1);
    return Math.round(c.getImageData(0, 0, 1, 1).data[0]/10) })"""


def rows_on_screen(page, css, want):
    "Wait until the pictures are those of the rows `want` (each row has a grey of its own), and return what is there"
    start = time.monotonic()
    while (found := page.evaluate(GREYS, css)) != want and time.monotonic() - start < WAIT: time.sleep(.1)
    return found


def test_clicking_changes_the_strips(procedures, tmp_path):  # noqa: F811
    index = random_index(1, procedures)
    index.save(tmp_path/"index")
    write_notebook(tmp_path/"explore.ipynb", tmp_path/"index")
    state = ExplorerState(index, k=4)
    hits = lambda: state.hits().row.tolist()
    with voila(tmp_path/"explore.ipynb", private_jupyter(tmp_path/"jupyter"), tmp_path/"voila.log") as url, browser_page() as page:
        page.goto(url, wait_until="domcontentloaded")
        page.wait_for_selector("img.freerep-strip")
        first = hits()
        assert rows_on_screen(page, "img.freerep-query", [0]) == [0]
        assert rows_on_screen(page, "img.freerep-strip", first) == first

        assert [page.locator("select").nth(i).evaluate("s => s.selectedIndex") for i in (0, 1)] == [0, 0]

        page.locator(".freerep-ask").nth(1).click()                        # "make query" at the second hit
        state.ask(first[1])
        assert rows_on_screen(page, "img.freerep-query", [first[1]]) == [first[1]]
        assert rows_on_screen(page, "img.freerep-strip", hits()) == hits() != first

        joined = hits()[2]
        page.locator(".freerep-add").nth(2).click()                        # "add to support" at the third
        state.add(joined)
        assert rows_on_screen(page, ".freerep-support img", [joined]) == [joined]
        assert rows_on_screen(page, "img.freerep-strip", hits()) == hits()
        assert joined not in hits()

        page.locator("select").nth(1).select_option(label="901-002")       # "search in"
        state.only("901-002")
        assert rows_on_screen(page, "img.freerep-strip", hits()) == hits()
        assert set(hits()) <= set(range(6, 12))

        page.locator(".freerep-clear").click()                             # "clear support"
        state.clear()
        assert rows_on_screen(page, ".freerep-support img", []) == []
        assert rows_on_screen(page, "img.freerep-strip", hits()) == hits()

        page.locator("select").nth(0).select_option(label="901-002")       # another video: its first tracklet asks
        state.ask(6)
        assert rows_on_screen(page, "img.freerep-query", [6]) == [6]
        assert rows_on_screen(page, "img.freerep-strip", hits()) == hits()
        best = state.hits().iloc[0]
        text = page.locator(".freerep-hit").first.inner_text()
        assert f"1. {best.score:.3f} \u00b7 00:{best.start_s:04.1f} to 00:{best.end_s:04.1f} \u00b7 901-002" in text
        assert ("same polyp" in text, "another polyp" in text) == ((False, False) if best.same is pd.NA else (bool(best.same), not best.same))
