#!/usr/bin/env python3
"""trace_picture.py TRACE.json OUT.png: one step of a trace (docs/trace.md) as a picture, a row per thread and stream.

The picture goes from the backward of a step to the next one's, so that the step's update and the forward that runs
above it are one piece. Waits are hatched; what a row is doing otherwise is coloured by its kind. Beside each row stands
for how long it worked and waited. Needs matplotlib. A trace of three steps has all that is needed.
"""
import argparse
import json
import pathlib
import sys

KINDS = {  # what the legend says: colour
    "backward": "#3b75af", "forward": "#a9cbe8", "update": "#4f9d69", "copied to the device": "#e8923c",
    "copied to the host": "#9a6fb0", "bookkeeping, collectives": "#8a8a8a"}
KIND_OF = {
    "backward": "backward", "complete": "backward", "add": "backward", "forward": "forward", "updates": "update",
    "update": "update", "state in": "copied to the device", "state out": "copied to the host",
    "take in": "copied to the host"}
# What goes to the tier of the weights, from the host lane's view, goes to the device; and the other way round.
ON_STREAM = {("gathers", "from tier"): "copied to the device", ("weights", "to tier"): "copied to the device",
             ("weights", "from tier"): "copied to the host"}
THREADS = {"host": "the program", "collective": "collectives", "gradient sums": "gradient sums",
           "update": "update, host's part", "streaming": "update, device's part"}
STREAMS = {"completing": "gradients", "reductions": "reductions", "gathers": "gathers", "state in": "state in",
           "updates": "update", "state out": "state out", "weights": "new weights"}
LABELLED = ("backward", "forward", "updates")
WAIT = "wait"


class Trace:
    """The spans of a file, in milliseconds."""

    def __init__(self, content):
        events = content["traceEvents"]
        self.names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        self.spans = sorted(((self.names[event["tid"]], event["name"], event["ts"] / 1e3,
                              (event["ts"] + event["dur"]) / 1e3, event["args"]["step"])
                             for event in events if event["ph"] == "X"), key=lambda span: (span[2], -span[3]))

    def steps(self):
        """Those that have a next one in the trace."""
        begun = sorted({step for row, name, _, _, step in self.spans if (row, name) == ("host", "backward")})
        return [step for step in begun if step + 1 in begun]

    def window(self, step):
        """(begin, end): its first backward and the next step's."""
        begins = {}
        for row, name, begin, _, of in self.spans:
            if (row, name) == ("host", "backward"):
                begins.setdefault(of, begin)
        return begins[step], begins[step + 1]

    def ends(self, name, step):
        """When the last span of this name ended."""
        return max((end for _, what, _, end, of in self.spans if (what, of) == (name, step)), default=None)

    def rows(self, begin, end):
        """{row: its spans, cut to the window, outer ones first}, threads before streams, without nearly empty ones."""
        order = [name for known in (THREADS, STREAMS) for name in known if name in self.names.values()]
        order += [name for name in self.names.values() if name not in order]
        found = {name: [] for name in order}
        for row, name, first, last, step in self.spans:
            if last > begin and first < end:
                found[row].append((name, max(first, begin) - begin, min(last, end) - begin, step))
        return {row: spans for row, spans in found.items() if covered(spans) > 1e-3 * (end - begin)}


def kind_of(row, name):
    return ON_STREAM.get((row, name)) or KIND_OF.get(name, "bookkeeping, collectives")


def covered(spans):
    """How long any of the spans runs."""
    total, until = 0.0, float("-inf")
    for _, begin, end, _ in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def works_and_waits(spans):
    waits = covered([span for span in spans if span[0].startswith(WAIT)])
    return covered(spans) - waits, waits


def draw(trace, step, title, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    begin, end = trace.window(step)
    rows = trace.rows(begin, end)
    pyplot.rcParams["hatch.linewidth"] = 0.6
    figure, axis = pyplot.subplots(figsize=(11, 1.5 + 0.36 * len(rows)))
    places, place = {}, 0.0
    for row in rows:
        place += 0.5 if places and row not in THREADS and not any(name in STREAMS for name in places) else 0
        places[row], place = place, place + 1
    for row, spans in rows.items():
        draw_row(axis, row, spans, places[row], end - begin)
    mark(axis, trace.ends("agree", step), begin, end, "norm known")
    mark(axis, trace.ends("updates", step), begin, end, "update done")
    axis.set_yticks(list(places.values()), [("" if row in THREADS else "device: ") + (THREADS | STREAMS).get(row, row)
                                            for row in places], fontsize=9)
    axis.set_ylim(place - 0.4, -0.6)
    axis.set_xlim(0, end - begin)
    axis.set_xlabel("milliseconds", fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.set_title(f"{title}: step {step}, {end - begin:.0f} ms", fontsize=11, loc="left", pad=22)
    used = {kind_of(row, span[0]) for row, spans in rows.items() for span in spans if not span[0].startswith(WAIT)}
    handles = [patches.Patch(color=colour, label=kind) for kind, colour in KINDS.items() if kind in used]
    handles.append(patches.Patch(label="waits", **WAITING))
    axis.legend(handles=handles, ncols=len(handles), fontsize=8, frameon=False, loc="upper center",
                bbox_to_anchor=(0.5, -0.45 / (0.36 * len(rows))), handlelength=1.4, columnspacing=1.4)
    figure.savefig(path, dpi=110, bbox_inches="tight", pil_kwargs={"optimize": True})
    pyplot.close(figure)


WAITING = {"facecolor": "white", "edgecolor": "#b9b9b9", "hatch": "/////", "linewidth": 0}


def in_order_of_drawing(row, spans):
    """What has waits in it, the waits, what is left. Of the program's row forward, backward and waits, no details."""
    waits = [span for span in spans if span[0].startswith(WAIT)]
    work = [span for span in spans if span not in waits and (row != "host" or span[0] in LABELLED)]
    has_waits = [span for span in work if span[0] in LABELLED
                 or any(span[1] <= first and last <= span[2] for _, first, last, _ in waits)]
    return has_waits + waits + [span for span in work if span not in has_waits]


def draw_row(axis, row, spans, place, length):
    for name, first, last, _ in in_order_of_drawing(row, spans):
        thick, colour = 0.4 if name in LABELLED else 0.34, KINDS[kind_of(row, name)]
        # An edge of its own keeps what is shorter than a pixel.
        style = {"facecolor": colour, "edgecolor": colour, "linewidth": 0.4, "alpha": 0.4 if name == "updates" else 1}
        axis.broken_barh([(first, last - first)], (place - thick, 2 * thick),
                         **(WAITING if name.startswith(WAIT) else style))
    for name, first, last, step in spans:
        if row == "host" and name in LABELLED and last - first > 0.12 * length:
            axis.text((first + last) / 2, place, f"{name} of step {step}", ha="center", va="center", fontsize=8,
                      bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1.5})
    works, waited = works_and_waits(spans)
    axis.text(1.005 * length, place, f"works {works:.0f} ms, waits {waited:.0f}", va="center", fontsize=8,
              color="#555555")


def mark(axis, at, begin, end, text):
    if at is None or not begin < at < end:
        return
    axis.axvline(at - begin, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    axis.text(at - begin, -0.7, text, ha="center", va="bottom", fontsize=8, color="#444444")


def read(path):
    """The Trace of a file; OSError or ValueError says what is wrong with it."""
    content = json.loads(path.read_text())
    try:
        return Trace(content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no trace of an engine: {error!r}") from error


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=pathlib.Path, metavar="TRACE.json")
    parser.add_argument("picture", type=pathlib.Path, metavar="OUT.png")
    parser.add_argument("--step", type=int, help="the first that has a next one if not given")
    parser.add_argument("--title", help="the trace's name if not given")
    return parser.parse_args()


def main():
    args = arguments()
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        sys.exit(f"a picture needs matplotlib: {error}")
    try:
        trace = read(args.trace)
    except (OSError, ValueError) as error:
        sys.exit(f"{args.trace}: {getattr(error, 'strerror', None) or error}")
    steps = trace.steps()
    step = steps[0] if args.step is None and steps else args.step
    if step not in steps:
        sys.exit(f"{args.trace}: {'no step' if step is None else f'step {step} is not one'} that has its backward and "
                 f"the next one's in it; there are {steps or 'none'}")
    draw(trace, step, args.title or args.trace.stem, args.picture)


if __name__ == "__main__":
    main()
