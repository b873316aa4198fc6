#pragma once

namespace tessera {

/// ssh starts `tessera launch-agent` on each host of a job except the first. Users never call this command.
///
/// It first writes its version, reads a job from standard input, and starts the job's ranks on this host. Then it
/// reports all events of the ranks to the launcher (hosts/frames.h). The launcher decides how ranks are ended and how
/// much time they have before that. The agent only sends the signals.
///
/// | event                                      | what happens                                    |
/// |--------------------------------------------|-------------------------------------------------|
/// | all ranks have ended                       | the agent ends with 0                           |
/// | standard input ends, or a write fails      | the ranks and their process groups are killed   |
/// | nothing arrives for the job's silence_s    | the same                                        |
/// | the agent dies, even by SIGKILL            | the same (guard.h)                              |
///
/// If nobody reads the launcher's output, the agent waits, and the ranks wait with it, as on one host. Returns the exit
/// code: 0, even if ranks failed; 64 if it is called on a terminal; 69 if the launcher is gone, or sends bytes that are
/// no frame; 70 if the first frame is no job.
int serve_launch_agent();

}  // namespace tessera
