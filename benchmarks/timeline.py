"""Reads one step of a Chrome trace. It uses the standard library only."""


def last_step_of_trace(trace):
    """Returns the events of the last complete step in a Chrome trace (an object with traceEvents, or the list itself).

    A step is a complete event (ph "X") named "step". Events of any process that begin during the step belong to the
    step. Tracks are "process / thread", by the names that the trace gives them. Raises ValueError if there is no step.
    """
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    spans = [event for event in events if event.get("ph") == "X"]
    step = max((event for event in spans if event["name"] == "step"), key=lambda event: event["ts"], default=None)
    if step is None:
        raise ValueError('the trace has no complete event named "step"')
    names = {(event["name"], event.get("pid"), event.get("tid") if event["name"] == "thread_name" else None):
             event["args"]["name"] for event in events if event.get("ph") == "M" and "name" in event.get("args", {})}

    def track(event):
        pid, tid = event.get("pid"), event.get("tid")
        return f"{names.get(('process_name', pid, None), pid)} / {names.get(('thread_name', pid, tid), tid)}"

    begin, end = step["ts"], step["ts"] + step["dur"]
    return [{"track": track(event), "name": event["name"], "start_us": event["ts"] - begin, "duration_us": event["dur"]}
            for event in spans if begin <= event["ts"] < end and event["name"] != "step"]
