# Compiler settings that every layer shares.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET default)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()
# RelWithDebInfo has -O2 and frame information. Only Debug has assertions of the standard library.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(CMAKE_CXX_FLAGS_DEBUG "-Og -g1 -D_GLIBCXX_ASSERTIONS")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # Without this setting, precompiled headers make ccache hash time stamps.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime)
  # In a build from nothing ccache takes the headers from the compiler's list of dependencies, and no longer
  # preprocesses each source before it is compiled.
  if(TESSERA_BATCHES)
    list(APPEND CMAKE_CXX_COMPILER_LAUNCHER CCACHE_DEPEND=1)
  endif()
  list(APPEND CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_library(tessera_options INTERFACE)
# Programs have -fPIC, too, since a precompiled header is used only for sources that are compiled with the same options.
target_compile_options(tessera_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-unused-parameter;-fPIC;-fpch-preprocess>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fPIC,-Wall>")
# Builds with this option contain the deliberately wrong lines that TESSERA_SEEDED_FAULT switches on
# (runtime/base/seeded_fault.h). Only our own sources get the definition, and no installed target has it.
if(TESSERA_FAULTS)
  target_compile_definitions(tessera_options INTERFACE TESSERA_SEEDED_FAULTS)
endif()
# GCC walks through its whole heap each time that it collects garbage, also through the precompiled header. This takes a
# third of a compilation with LibTorch. It collects no garbage while the heap is smaller than 2 GiB.
target_compile_options(tessera_options INTERFACE
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:--param ggc-min-heapsize=2097152>")
option(TESSERA_WERROR "Treat warnings as errors (what scripts/test does)" OFF)
if(TESSERA_WERROR)
  target_compile_options(tessera_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
endif()
# Clang checks which members need a mutex (runtime/base/mutex.h). Here, only the preset fuzz builds with Clang.
target_compile_options(tessera_options INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>")
if(TESSERA_WERROR OR TESSERA_FUZZ)
  target_compile_options(tessera_options INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Werror=thread-safety>")
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TESSERA_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
