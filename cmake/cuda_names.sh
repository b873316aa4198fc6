#!/bin/sh
# cuda_names.sh NM LIBRARY SOURCE: writes a C++ source that has the names of the functions of LibTorch's library for GPUs which Tessera may
# call, and nothing behind them (tessera_load_cuda_late, TesseraCuda.cmake).
set -eu
names=$("$1" -D --defined-only "$2" | sed -nE 's/^[0-9a-f]+ [TW] (_ZNK?(4c10d|2at4cuda)[A-Za-z0-9_]+)$/".globl \1\\n.type \1,@function\\n\1:\\n"/p')
printf '%s\n' '__asm__(".text\n"' "$names" '".long 0\n");' >"$3"
