"""Checks the site in Chromium: look.py SITE PICTURES.

Every page is opened at the width of a desktop and of a phone. It must not scroll sideways, all its pictures must load,
no script may fail, and nothing may come from another machine. Search must find a word. Ten pages are drawn into
PICTURES at both widths, light and dark, so that a person can look at them. The program ends with exit code 69 if there
is no Chromium.
"""

import functools
import http.server
import json
import pathlib
import queue
import shutil
import subprocess
import sys
import threading

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
PATIENCE_S = 900
DRAWN = ["index.html", "install.html", "start-python.html", "concepts.html", "guide/strategies.html", "recipes.html", "coming-from.html",
         "strategy.html", "errors.html", "cpp/engine.html"]
# This script opens the pages one by one in a frame of a given width, and sends its findings as JSON.
EYE = """<!doctype html><meta charset="utf-8"><body style="margin:0"><script>
const pages = PAGES, widths = WIDTHS_, seen = [];
const say = (page, width, text) => seen.push(`${page} (${width}): ${text}`);
const wait = ms => new Promise(done => setTimeout(done, ms));
async function open(page, width, height) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;width:${width}px;height:${height}px`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  return frame;
}
async function look(page, name, [width, height]) {
  const frame = await open(page, width, height);
  const inner = frame.contentDocument, root = inner.documentElement;
  inner.querySelectorAll("img[loading]").forEach(one => one.loading = "eager");
  await wait(30);
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...inner.querySelectorAll("article *")].find(one => one.getBoundingClientRect().right > root.clientWidth + 1);
    say(page, name, `scrolls sideways: ${root.scrollWidth} columns in ${root.clientWidth}, by ${wide ? wide.outerHTML.slice(0, 120) : "?"}`);
  }
  for (const image of inner.images) if (image.complete && image.naturalWidth === 0) say(page, name, `no picture ${image.src}`);
  for (const { name: source } of frame.contentWindow.performance.getEntriesByType("resource"))
    if (!source.startsWith(location.origin) && !source.startsWith("data:")) say(page, name, `comes from elsewhere: ${source}`);
  frame.remove();
}
async function search(word) {
  const frame = await open("index.html", 1280, 900), inner = frame.contentDocument;
  const query = inner.querySelector("[data-md-component=search-query]");
  inner.querySelector("#__search").click();
  query.focus();
  for (let turn = 0; turn < 100; ++turn) {
    query.value = word;
    query.dispatchEvent(new Event("input", { bubbles: true }));
    query.dispatchEvent(new Event("keyup", { bubbles: true }));
    await wait(100);
    if (inner.querySelector(".md-search-result__item")) return;
  }
  say("index.html", "desktop", `search does not find ${word}`);
}
(async () => {
  for (const page of pages) for (const name in widths) await look(page, name, widths[name]);
  await search("SHARD_GRAD_OP");
  await fetch("seen", { method: "POST", body: JSON.stringify({ pages: pages.length, seen }) });
})();
</script>
"""


class Server(http.server.SimpleHTTPRequestHandler):
    """Gives pages to Chromium, and takes its reports."""

    seen = queue.Queue()

    def do_POST(self):
        self.seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def chromium(*arguments):
    return subprocess.Popen([shutil.which("chromium") or shutil.which("google-chrome"), "--headless", "--no-sandbox", "--disable-gpu",
                             "--hide-scrollbars", "--disable-dev-shm-usage", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(site, pictures):
    site, pictures = pathlib.Path(site), pathlib.Path(pictures)
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        print("docs: no Chromium, so nobody looked at the pages: apt-get install chromium", file=sys.stderr)
        return 69
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html") if page.name not in ("404.html", "eye.html"))
    eye = site / "eye.html"
    eye.write_text(EYE.replace("PAGES", json.dumps(pages)).replace("WIDTHS_", json.dumps(WIDTHS)), encoding="utf-8")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        reader = chromium("--remote-debugging-port=0", f"{address}/eye.html")  # Chromium stays until it is ended
        try:
            seen = Server.seen.get(timeout=PATIENCE_S)
        except queue.Empty:
            print(f"docs: Chromium did not come to the end of the pages in {PATIENCE_S} s", file=sys.stderr)
            return 70
        finally:
            reader.terminate()
            reader.wait()
        pictures.mkdir(parents=True, exist_ok=True)
        for page in DRAWN:
            for name, (width, height) in WIDTHS.items():
                for colours, number in (("light", 1), ("dark", 0)):
                    file = pictures / f"{page.removesuffix('.html').replace('/', '-')}-{name}-{colours}.png"
                    # A phone's page is shown in a frame of a phone's width, since a window of Chromium is at least 500
                    # columns wide.
                    frame = site / "frame.html"
                    frame.write_text(f'<body style="margin:0"><iframe src="{page}" style="border:0;width:{width}px;height:{height}px">')
                    chromium(f"--blink-settings=preferredColorScheme={number}", f"--window-size={width},{height}", "--virtual-time-budget=3000",
                             f"--screenshot={file}", f"{address}/frame.html").wait(PATIENCE_S)
    finally:
        server.shutdown()
        eye.unlink()
        (site / "frame.html").unlink(missing_ok=True)
    print("\n".join(seen["seen"]) or f"docs: {seen['pages']} pages look right at both widths; {pictures} has pictures of {len(DRAWN)}")
    return 65 if seen["seen"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
