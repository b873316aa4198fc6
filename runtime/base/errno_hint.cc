#include "runtime/base/errno_hint.h"

#include <cerrno>

namespace tessera {
namespace {

/// What holds for reading and writing alike.
std::string hint_of_path(int error) {
  switch (error) {
    case ENOTDIR:
      return ". hint: a part of this path is a file, not a folder";
    case ENAMETOOLONG:
    case ELOOP:
      return ". hint: name a shorter path without circles of links";
    case EIO:
    case ESTALE:
    case ENODEV:
    case ENXIO:
      return ". hint: the disk or file server failed (see dmesg); try another one";
    default:
      return "";
  }
}

}  // namespace

std::string hint_of_reading(int error) {
  switch (error) {
    case ENOENT:
      return ". hint: check the path; relative ones start at the folder the program was started in";
    case EACCES:
    case EPERM:
      return ". hint: let this user read it (chmod, chown), and enter the folders above it";
    case EISDIR:
      return ". hint: name the file itself";
    default:
      return hint_of_path(error);
  }
}

std::string hint_of_writing(int error) {
  switch (error) {
    case ENOENT:
      return ". hint: create its folder first (mkdir -p)";
    case EACCES:
    case EPERM:
      return ". hint: name a folder that this user may write to";
    case EROFS:
      return ". hint: the file system is mounted read-only; name another folder";
    case EISDIR:
      return ". hint: a folder has this name; name a file";
    case EEXIST:
      return ". hint: name another path, or move what is there";
    case ENOSPC:
      return ". hint: free some space there, or name another folder";
    case EDQUOT:
      return ". hint: this user's quota is used up; raise it, or name another folder";
    default:
      return hint_of_path(error);
  }
}

}  // namespace tessera
