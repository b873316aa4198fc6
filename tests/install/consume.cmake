# Installs into a scratch prefix, runs the installed command, and builds and runs the program of README.md against the
# installed copy.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${SCRATCH})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${SCRATCH}/prefix)

# Users see only public headers.
file(GLOB_RECURSE installed RELATIVE ${SCRATCH}/prefix/include ${SCRATCH}/prefix/include/*)
foreach(header ${installed})
  if(NOT header MATCHES "^tessera/[a-z_]+\\.h$")
    message(FATAL_ERROR "include/${header} was installed, which is no public header")
  endif()
endforeach()

# The installed command finds LibTorch by itself.
run(${CMAKE_COMMAND} -E env --unset=LD_LIBRARY_PATH ${SCRATCH}/prefix/bin/tessera --version)
run(${CMAKE_COMMAND} -E env --unset=LD_LIBRARY_PATH ${SCRATCH}/prefix/bin/tessera doctor)

set(flags "")
if(FLAGS)
  set(flags "-DCMAKE_CXX_FLAGS=-fsanitize=${FLAGS}")
endif()
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${SCRATCH}/build -G Ninja -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix ${flags})
run(${CMAKE_COMMAND} --build ${SCRATCH}/build)
function(expect_learning program)
  run(${CMAKE_COMMAND} -E env TESSERA_LOG_LEVEL=warning ${program})
  if(NOT output MATCHES "step 0  loss ([0-9.e-]+)")
    message(FATAL_ERROR "the program printed no first loss")
  endif()
  set(first ${CMAKE_MATCH_1})
  if(NOT output MATCHES "step 19  loss ([0-9.e-]+)")
    message(FATAL_ERROR "the program printed no last loss")
  endif()
  if(NOT CMAKE_MATCH_1 LESS first)
    message(FATAL_ERROR "the program did not learn")
  endif()
endfunction()
expect_learning(${SCRATCH}/build/consumer)

# This builds the same program without CMake, with the flags that pkg-config gives for the copy.
find_program(PKG_CONFIG NAMES pkg-config pkgconf REQUIRED)
file(GLOB_RECURSE package ${SCRATCH}/prefix/*/tessera.pc)
cmake_path(GET package PARENT_PATH folder)
run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} ${PKG_CONFIG} --cflags tessera)
separate_arguments(compile UNIX_COMMAND "${output}")
run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} ${PKG_CONFIG} --libs tessera)
separate_arguments(link UNIX_COMMAND "${output}")
if(FLAGS)
  list(PREPEND compile -fsanitize=${FLAGS})
endif()
run(${CXX} -std=c++20 ${compile} ${SOURCE}/main.cc -o ${SCRATCH}/by_pkg_config ${link})
expect_learning(${SCRATCH}/by_pkg_config)

# README and the page for C++ must show this program.
file(READ ${SOURCE}/main.cc program)
foreach(page README.md docs/start-cpp.md)
  file(READ ${CMAKE_CURRENT_LIST_DIR}/../../${page} text)
  string(FIND "${text}" "${program}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "${page} does not show ${SOURCE}/main.cc as it is")
  endif()
endforeach()
