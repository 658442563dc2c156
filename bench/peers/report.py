"""The measured rows as tables in Markdown, for docs/, and as a picture."""
import jobs

HEAD = ("mode", "s a step", "of the best peer", "goal", "tokens/s", "peak device GiB", "host GiB",
        "host link GB a step (formula)", "loss")
OTHER_CALL = "†"
OURS, PEER, OTHER_JOB, GOAL = "#1f77b4", "#8c8c8c", "#d0d0d0", "#d62728"


def goal_of(job_name, mode):
    return next((row.goal for row in jobs.JOBS[job_name].rows if row.mode == mode), None)


def goal_seconds(goal, lines):
    """The step a goal allows, beside the lines of its job; None: none, or its peer was not measured."""
    if goal is None or goal.times is None:
        return goal and goal.step_s
    factor, peer = goal.times
    return factor * lines[peer]["step_s"] if "step_s" in lines.get(peer, {}) else None


def misses(goal, line, lines):
    """What of a goal a measured line does not reach."""
    seconds = goal_seconds(goal, lines)
    pairs = (("s a step", line["step_s"], seconds), ("device GiB", line["peak_gib"], goal.peak_gib),
             ("host GiB", line["host_gib"], goal.host_gib))
    return [f"{value:g} {what}, at most {most:g}" for what, value, most in pairs
            if value is not None and most is not None and value > most]


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
    parts += [f"{most:g} GiB{where}" for most, where in ((goal.peak_gib, ""), (goal.host_gib, " of host")) if most]
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
    goal = _goal_text(goal_of(job_name, mode), line, lines)
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


def plot(file, path):
    """A panel per job: bars of the step, the peaks of memory beside them, goals as marks. Of the newest machine."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    machine, found = list(file.tables())[-1]
    panels = {name: {mode: line for mode, line in lines.items() if "step_s" in line} for name, lines in found.items()}
    panels = {name: lines for name, lines in panels.items() if lines}
    if not panels:
        raise ValueError("nothing is measured that could be drawn")
    heights = [1 + 0.38 * len(lines) for lines in panels.values()]
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, sum(heights) + 0.6), squeeze=False,
                                   gridspec_kw={"height_ratios": heights})
    for (name, lines), axis in zip(panels.items(), axes[:, 0]):
        _panel(axis, name, lines)
    figure.suptitle(f"Seconds a step; peak memory in GiB. {machine}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axis, name, lines):
    longest = max(line["step_s"] for line in lines.values())
    for place, (mode, line) in enumerate(lines.items()):
        kind = jobs.MODES[mode]
        axis.barh(place, line["step_s"], color=OURS if kind.is_ours else OTHER_JOB if kind.other_job else PEER)
        device = "" if line["peak_gib"] is None else f"device {line['peak_gib']:.1f}, "
        text = f" {line['step_s']:.3g} s ({device}host {line['host_gib']:.1f})"
        axis.text(line["step_s"], place, text, va="center", fontsize=8)
        goal = goal_seconds(goal_of(name, mode), lines)
        if goal is not None:
            axis.plot([goal, goal], [place - 0.45, place + 0.45], color=GOAL, linewidth=2)
    axis.set_yticks(range(len(lines)), [jobs.MODES[mode].title for mode in lines], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, longest * 1.35)
    axis.set_title(jobs.title_of(jobs.JOBS[name]), fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
