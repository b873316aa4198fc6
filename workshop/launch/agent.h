#pragma once

namespace tessera {

/// `tessera launch-agent`: ssh starts it on each host of a job but the first. It is no command for users.
///
/// It greets with its version, reads a job from standard input, starts the job's ranks on this host, and tells the
/// launcher what they do (hosts/frames.h). The launcher decides how ranks are ended and how long they have before that;
/// the agent only does it.
///
/// | event                                      | what happens                                    |
/// |--------------------------------------------|-------------------------------------------------|
/// | all ranks have ended                       | it ends, with 0                                 |
/// | standard input ends, nothing can be written| the ranks and their process groups are killed   |
/// | nothing comes for the job's silence_s      | the same                                        |
/// | it dies, even by SIGKILL                   | the same (guard.h)                              |
///
/// A launcher whose output nobody reads makes the agent wait, and the ranks with it, as on one host. Returns the exit
/// code: 0, even if ranks failed; 64 on a terminal; 69 if the launcher is gone, or sends bytes that are no frame; 70
/// for a first frame that is no job.
int serve_launch_agent();

}  // namespace tessera
