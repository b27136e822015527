"""Watches a service's log, tells what stands out and when that happened before, and answers questions about it."""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = tomllib.loads((HERE / "config.toml").read_text())


def watch(log, folder, follow, question):
    from memstream import Replay, ReplayConfig

    config = ReplayConfig(**CONFIG["replay"], follow=follow)
    with Replay(log, model=CONFIG["model"], config=config, store=folder / "lines.db", state=folder / "state") as replay:
        for event in replay:
            if event.type == "alert":
                before = "".join(f" (like line {past.line})" for past in event.past[:1])
                print(f"line {event.line} {event.level or ''}: {event.message}{before}", flush=True)
            elif event.type == "summary":
                print(f"{event.lines} lines, {event.alerts} alerts", flush=True)
        if question:
            found = replay.ask(question).found
            print(*[f"{line.time:%H:%M:%S} {line.text}" for line in (found[0].lines if found else ())], sep="\n")


def script():
    """Watches the log of a shop for an afternoon in two runs, and checks what an operator reads."""
    kinds = ["INFO order {} was paid", "INFO mail {} sent", "INFO stock of item {} checked"]
    lines = [f"2026-11-30T{12 + i // 1800:02}:{i // 30 % 60:02}:00Z " + kinds[i % 3].format(i) for i in range(2400)]
    for at in (1000, 2000):
        lines[at] = lines[at][:21] + "FATAL payment gateway: connection refused"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "shop.log"
        command = [sys.executable, __file__, str(log), "--folder", folder, "--ask", "when was the gateway refused?"]
        for n in (1500, 2400):
            log.write_text("".join(line + "\n" for line in lines[:n]))
            out = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout
            print(out, end="")
    assert "line 2001 FATAL: payment gateway: connection refused (like line 1001)\n2400 lines, 2 alerts\n" in out
    assert out.count("FATAL payment") == 2, "both times are in the answer"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", nargs="?", help="a file, or - for standard input")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where lines and progress are kept")
    parser.add_argument("--follow", action="store_true", help="wait for more at the end, through rotation")
    parser.add_argument("--ask", help="a question about what was read, at the end")
    parser.add_argument("--script", action="store_true", help="play an afternoon, checked")
    options = parser.parse_args()
    script() if options.script else watch(options.log, options.folder, options.follow, options.ask)
