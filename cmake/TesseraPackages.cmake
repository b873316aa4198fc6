# The packages that Tessera uses. Each has a hint for users whose machine lacks it.

# tessera_find(<package> <Debian's name> [find_package's arguments]...)
macro(tessera_find package debian)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "${package} ${ARGN} not found. scripts/setup installs it (Debian: ${debian}); "
      "for a copy elsewhere add its prefix to CMAKE_PREFIX_PATH.")
  endif()
endmacro()

tessera_find(nlohmann_json nlohmann-json3-dev 3.11)
tessera_find(absl libabsl-dev)
tessera_find(fmt libfmt-dev)
tessera_find(spdlog libspdlog-dev)
tessera_find(Threads libc6-dev)

# Only the header of xxHash is used. It has no package file on some systems.
find_path(TESSERA_XXHASH_INCLUDE xxhash.h)
if(NOT TESSERA_XXHASH_INCLUDE)
  message(FATAL_ERROR "xxhash.h not found. scripts/setup installs it (Debian: libxxhash-dev); "
    "for a copy elsewhere set TESSERA_XXHASH_INCLUDE to its folder.")
endif()
add_library(tessera_xxhash INTERFACE)
target_include_directories(tessera_xxhash SYSTEM INTERFACE ${TESSERA_XXHASH_INCLUDE})
if(TESSERA_SANITIZE)
  # In instrumented builds, GCC cannot inline all functions that the header wants to be inlined.
  target_compile_definitions(tessera_xxhash INTERFACE XXH_NO_INLINE_HINTS=1)
endif()

include(TesseraUring)
find_path(TESSERA_URING_INCLUDE liburing.h)
if(NOT TESSERA_URING_INCLUDE)
  message(FATAL_ERROR "liburing.h not found. scripts/setup installs it (Debian: liburing-dev); "
    "for a copy elsewhere set TESSERA_URING_INCLUDE to its folder.")
endif()

# tessera_find_library(<target> <header> <names of libraries> <Debian's name>): finds a library without a package file
# for CMake. It uses the library's archive if there is one, so that programs also run on machines without the library.
function(tessera_find_library target header libraries debian)
  string(TOUPPER ${target} prefix)
  find_path(${prefix}_INCLUDE ${header})
  find_library(${prefix}_LIBRARY NAMES ${libraries})
  if(NOT ${prefix}_INCLUDE OR NOT ${prefix}_LIBRARY)
    message(FATAL_ERROR "${header} or its library not found. scripts/setup installs it (Debian: ${debian}); "
      "for a copy elsewhere set ${prefix}_INCLUDE and ${prefix}_LIBRARY.")
  endif()
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE ${${prefix}_INCLUDE})
  target_link_libraries(${target} INTERFACE ${${prefix}_LIBRARY})
endfunction()
# Tokenizers need regular expressions and normal forms of text.
if(TESSERA_PROGRAMS)
  tessera_find_library(tessera_pcre2 pcre2.h "libpcre2-8.a;pcre2-8" libpcre2-dev)
  tessera_find_library(tessera_utf8proc utf8proc.h "libutf8proc.a;utf8proc" libutf8proc-dev)
endif()

if(TESSERA_TORCH AND TESSERA_PROGRAMS)
  tessera_find(CLI11 libcli11-dev)
endif()
if(TESSERA_TESTS)
  enable_testing()
  tessera_find(GTest libgtest-dev)
  include(GoogleTest)
endif()
