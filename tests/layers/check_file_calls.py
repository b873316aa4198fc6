"""Checks that code which writes or removes files in folders for checkpoints, durable files and outputs uses
offload/files/file_calls.h. The functions of this header follow no link below the folder that a user named, even if a
folder is replaced by a link while they run. EXCEPT has the files that call the system themselves, with the reason.

Usage: check_file_calls.py ROOT
"""

import pathlib
import re
import sys

FOLDERS = ["checkpoint", "offload", "engine/asynchronous/servers", "engine/checkpoint", "engine/memory", "engine/saving"]
EXCEPT = {
    "checkpoint/checkpoint_folder.cc": "makes the folder that the user named",
    "checkpoint/tensor_files_writer.cc": "makes the folder that the user named",
    "offload/files/atomic_file.cc": "makes the folder that the user named",
    "offload/files/file_calls.cc": "the calls themselves",
    "offload/files/output_file.cc": "makes new files right in the folder that the user named",
    "offload/files/unsynced_files.cc": "undoes changes for tests, as a loss of power would",
}
CALL = re.compile(
    r"(?<![\w>])::(?:open|openat|creat|unlink|unlinkat|rename|renameat2?|mkdir|mkdirat|rmdir|truncate|symlink|link|opendir)\("
    r"|\b(?:fopen|std::rename|std::remove)\(|\b[io]?fstream\b"
    r"|\b(?:fs|filesystem)::(?:remove|remove_all|rename|create_\w+|copy\w*|resize_file|(?:recursive_)?directory_iterator)\b")
COMMENT = re.compile(r"//[^\n]*")


def complaints(root):
    unused = set(EXCEPT)
    for folder in FOLDERS:
        for path in sorted([*(root / folder).rglob("*.cc"), *(root / folder).rglob("*.h")]):
            name = path.relative_to(root).as_posix()
            for number, line in enumerate(path.read_text().splitlines(), 1):
                found = CALL.search(COMMENT.sub("", line))
                if found and name not in EXCEPT:
                    yield f"{name}:{number}: {found[0]} follows links. hint: take the function of offload/files/file_calls.h"
                if found:
                    unused.discard(name)
    for name in sorted(unused):
        yield f"{name} makes no such call. hint: remove it from EXCEPT of check_file_calls.py"


def main(root):
    found = list(complaints(pathlib.Path(root)))
    print("\n".join(found) or f"files are opened, renamed and removed by file_calls.h, but for {len(EXCEPT)} files with a reason")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
