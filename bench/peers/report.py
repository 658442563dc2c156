"""The measured rows as tables in Markdown, for docs/, and as a picture."""
import jobs

HEAD = ("mode", "s a step", "of the best peer", "goal", "tokens/s", "peak device GiB", "host GiB",
        "host link GB a step (formula)", "loss")
OTHER_CALL = "†"
OURS, PEER, OTHER_JOB, GOAL, HEAD_COLOUR = "#1f77b4", "#8c8c8c", "#d0d0d0", "#d62728", "#555555"


def goal_seconds(goal, lines):
    """The step a goal allows, beside the lines of its job; None: none, or its peer was not measured."""
    if goal is None or goal.times is None:
        return goal and goal.step_s
    factor, peer = goal.times
    return factor * lines[peer]["step_s"] if "step_s" in lines.get(peer, {}) else None


def multiples(goal, line, lines):
    """[(a measured value as a multiple of what the goal allows, the same in words)] for each part of the goal."""
    parts = (("s a step", line["step_s"], goal_seconds(goal, lines)), ("device GiB", line["peak_gib"], goal.peak_gib),
             ("host GiB", line["host_gib"], goal.host_gib))
    return [(value / most, f"{value:g} {what}, at most {most:.4g}") for what, value, most in parts
            if value is not None and most is not None]


def misses(goal, line, lines):
    """What of a goal a measured line does not reach."""
    return [text for multiple, text in multiples(goal, line, lines) if multiple > 1]


def farthest(lines):
    """(multiple of its goal, the row and the goal in words) of the measured line that is farthest from it, or None."""
    by_job = {}
    for line in lines:
        by_job.setdefault(line["job"], {})[line["mode"]] = line
    found = []
    for line in lines:
        goal = jobs.goal_of(line["job"], line["mode"])
        if goal and "step_s" in line:
            found += [(multiple, f"{line['job']} {line['mode']}: {text}")
                      for multiple, text in multiples(goal, line, by_job[line["job"]])]
    return max(found, default=None)


def best_peer(lines):
    """The line of the fastest peer that does the same job."""
    peers = [line for mode, line in lines.items()
             if "step_s" in line and not jobs.MODES[mode].is_ours and not jobs.MODES[mode].other_job]
    return min(peers, key=lambda line: line["step_s"], default=None)


def _goal_text(goal, line, lines):
    if goal is None:
        return ""
    parts = []
    if goal.times:
        parts.append(f"{goal.times[0]:g} x {goal.times[1]}")
    seconds = goal_seconds(goal, lines)
    if seconds is not None:
        parts.append(f"{seconds:.3g} s")
    parts += [f"{most:.4g} GiB{where}" for most, where in ((goal.peak_gib, ""), (goal.host_gib, " of host")) if most]
    return ", ".join(parts) + (" (missed)" if misses(goal, line, lines) else "")


def _cells(job_name, mode, line, lines):
    peer, times = best_peer(lines), ""
    if peer and jobs.MODES[mode].is_ours:
        mark = OTHER_CALL if peer["call"] != line["call"] else ""
        times = f"{line['step_s'] / peer['step_s']:.2f} x {peer['mode']}{mark}"
    formula, link = line.get("host_link_formula"), ""
    if line.get("host_link_bytes"):
        link = f"{line['host_link_bytes'] / 1e9:.3g}" + ("" if formula is None else f" ({formula / 1e9:.3g})")
    peak = "" if line["peak_gib"] is None else f"{line['peak_gib']:.1f}"
    goal = _goal_text(jobs.goal_of(job_name, mode), line, lines)
    return (f"{line['step_s']:.4g}", times, goal, f"{line['tokens_s']}", peak, f"{line['host_gib']:.1f}", link,
            f"{line['loss']:.4f}")


def _title(mode):
    other = jobs.MODES[mode].other_job
    return f"{jobs.MODES[mode].title} (`{mode}`{'; another job: ' + other if other else ''})"


def _row(*cells):
    return "| " + " | ".join(cells) + " |"


def _job_table(name, lines):
    measured = {mode: line for mode, line in lines.items() if "step_s" in line}
    text = [f"**{name}**: {jobs.title_of(jobs.JOBS[name])}"]
    if measured:
        one = next(iter(measured.values()))
        text[0] += f". {one['steps']} steps after {one['warm']}; loss after {one['loss_after']}"
        text += ["", _row(*HEAD), _row(*("---" for _ in HEAD))]
        text += [_row(_title(mode), *_cells(name, mode, line, lines)) for mode, line in measured.items()]
    left = [f"- not measured: {_title(mode)}: {line['not_measured']}" for mode, line in lines.items()
            if mode not in measured]
    return "\n".join(text + ([""] + left if left else []))


def table(file):
    """Every machine's jobs, a table each."""
    parts = []
    for machine, found in file.tables():
        lines = [line for modes in found.values() for line in modes.values()]
        versions = {name: v for name, v in lines[-1]["versions"].items() if v}
        builds = sorted({line["commit"] for line in lines if jobs.MODES[line["mode"]].is_ours})
        parts.append(f"Machine: {machine}. {', '.join(f'{name} {v}' for name, v in versions.items())}; Strata "
                     f"{', '.join(builds) or 'not run'}; {', '.join(sorted({line['date'][:10] for line in lines}))}.")
        parts += [_job_table(name, modes) for name, modes in found.items()]
    if any(OTHER_CALL in part for part in parts):
        parts.append(f"{OTHER_CALL} measured in another call on the same machine.")
    return "\n\n".join(parts)


def why_no_plot():
    """"" where a picture can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"a plot needs matplotlib: {error}"
    return ""


def newest(file):
    """(machine, {job: {mode: line}}) that was measured on last; (None, {}) where there is nothing."""
    return next(reversed(list(file.tables())), (None, {}))


def plot(file, path):
    """Draws the newest machine's rows into a PNG. ValueError: none is measured."""
    figure = draw(file)
    figure.savefig(path, dpi=130)


# Inches of the picture: left of the bars, the bars, right of them; above a panel's bars, a bar, below them; above all.
LEFT, BARS, RIGHT = 3.9, 4.4, 4.5
ABOVE, BAR, BELOW, TOP = 0.62, 0.27, 0.35, 0.35
# Of the text right of the bars: where a column ends, its head, what it says of a line.
COLUMNS = ((0.75, "s a step", lambda line: f"{line['step_s']:#.3g}"),
           (1.5, "tokens/s", lambda line: f"{line['tokens_s']:,}"),
           (2.3, "device GiB", lambda line: "" if line["peak_gib"] is None else f"{line['peak_gib']:.1f}"),
           (3.0, "host GiB", lambda line: f"{line['host_gib']:.1f}"),
           (4.3, "loss", lambda line: f"{line['loss']:.4f} after {line['loss_after']}"))


def draw(file):
    """A panel per job: bars of the step with goals as marks, and right of them, in columns, what was measured."""
    from matplotlib.figure import Figure

    machine, found = newest(file)
    panels = {name: {mode: line for mode, line in lines.items() if "step_s" in line} for name, lines in found.items()}
    panels = {name: lines for name, lines in panels.items() if lines}
    if not panels:
        raise ValueError("no row is measured that could be drawn")
    width = LEFT + BARS + RIGHT
    height = TOP + sum(ABOVE + BAR * len(lines) + BELOW for lines in panels.values())
    figure, place = Figure(figsize=(width, height)), height - TOP
    figure.text(0.5, 1 - 0.2 / height, machine, fontsize=10, ha="center", va="center")
    for name, lines in panels.items():
        place -= ABOVE + BAR * len(lines)
        _panel(figure.add_axes((LEFT / width, place / height, BARS / width, BAR * len(lines) / height)), name, lines)
        place -= BELOW
    return figure


def _panel(axis, name, lines):
    ends = [line["step_s"] for line in lines.values()]
    for place, (mode, line) in enumerate(lines.items()):
        kind = jobs.MODES[mode]
        axis.barh(place, line["step_s"], color=OURS if kind.is_ours else OTHER_JOB if kind.other_job else PEER)
        goal = goal_seconds(jobs.goal_of(name, mode), lines)
        if goal is not None:
            axis.plot([goal, goal], [place - 0.4, place + 0.4], color=GOAL, linewidth=2)
            ends.append(goal)
    for end, head, text in COLUMNS:
        for place, said in enumerate([head, *map(text, lines.values())], -1):
            axis.annotate(said, (1, place), (72 * end, 0), axis.get_yaxis_transform(), "offset points", fontsize=8,
                          ha="right", va="center", color=HEAD_COLOUR if said is head else "black")
    axis.set_yticks(range(len(lines)), [jobs.MODES[mode].title for mode in lines], fontsize=8)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_xlim(0, 1.02 * max(ends))
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(jobs.title_of(jobs.JOBS[name]), fontsize=9, loc="left", pad=20)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
