#pragma once

namespace tessera {

/// Exit codes of every Tessera program, after sysexits.h. 128 + n means that signal n ended the program.
enum class ExitCode : int {
  kOk = 0,             ///< success
  kUsage = 64,         ///< wrong command line, or a wrong call
  kCorruptData = 65,   ///< a file's content is wrong
  kNoInput = 66,       ///< a file is missing
  kUnavailable = 69,   ///< a port, store or device is not available
  kInternal = 70,      ///< a bug, or an exception of the user's model
  kOsResource = 71,    ///< memory, file descriptors or locked memory ran out
  kCannotCreate = 73,  ///< output cannot be created
  kIo = 74,            ///< read or write failed
  kPeerLost = 75,      ///< a rank died or did not answer in time: restartable
  kPermission = 77,    ///< a file or folder may not be read or written
  kConfig = 78,        ///< the strategy file, model file or environment is wrong
};

}  // namespace tessera
