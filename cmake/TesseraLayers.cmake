option(TESSERA_BATCHES "Compile sources several at a time: fast from nothing, slow after a change" OFF)

# tessera_compile_in_batches(<target> [<sources in a batch>]). The names of a batch's unnamed namespaces must differ.
function(tessera_compile_in_batches target)
  set(sources 6)
  if(ARGC GREATER 1)
    set(sources ${ARGV1})
  endif()
  if(TESSERA_BATCHES)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${sources})
    # A batch is compiled like a source, so an unnamed namespace in it is no mistake.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# The headers that most files without LibTorch include. They are precompiled once for layers, and once with GoogleTest
# for tests. Sources still include the headers that they use.
set(tessera_std_headers
  <absl/status/status.h> <absl/status/statusor.h> <fmt/format.h> <nlohmann/json.hpp>
  <algorithm> <array> <atomic> <bit> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <deque> <filesystem> <fstream>
  <functional> <map> <memory> <mutex> <optional> <set> <span> <string> <string_view> <thread> <utility> <variant> <vector>)

# tessera_std_pch(<name> <header>... [LINK <target>...]): declares such a precompiled header.
function(tessera_std_pch name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  if(NOT TARGET ${name})
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/${name}.cc CONTENT "")
    add_library(${name} OBJECT ${PROJECT_BINARY_DIR}/${name}.cc)
    target_link_libraries(${name} PRIVATE
      absl::status absl::statusor absl::strings fmt::fmt nlohmann_json::nlohmann_json ${ARG_LINK} tessera_options)
    target_precompile_headers(${name} PRIVATE ${tessera_std_headers} ${ARG_UNPARSED_ARGUMENTS})
  endif()
endfunction()

# tessera_layer(<name> SOURCES <file>... [LINK <target>...])
#
# Declares the layer tessera_<name>. Sources are listed one by one. A layer may include headers of those layers that it
# links. All includes are written from the root of the tree ("sharding/unit.h"), so the layer of a header is its folder.
function(tessera_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(tessera_${name} STATIC ${ARG_SOURCES})
  target_include_directories(tessera_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  target_link_libraries(tessera_${name} PUBLIC ${ARG_LINK} PRIVATE $<BUILD_INTERFACE:tessera_options>)
  tessera_std_pch(tessera_layer_pch)
  target_precompile_headers(tessera_${name} REUSE_FROM tessera_layer_pch)
  tessera_compile_in_batches(tessera_${name})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYERS tessera_${name})
endfunction()

# tessera_test(<name> SOURCES <file>... LINK <target>... [LABELS ...] [TIMEOUT s] [CLOCK filter] [FAST] [WHOLE]
#              [SHARDS n] [TORCH] [ALONE] [IN <program>])
#
# This makes one GoogleTest executable. It is registered as one ctest entry for each test case, or with WHOLE as one
# entry for all. TORCH: the test includes LibTorch's headers. ALONE: no other test runs at the same time as its cases of
# CLOCK, which check how soon something is noticed. Without CLOCK, this holds for all its cases. FAST: the test belongs
# to `ctest -L fast`, which runs some tests of every room in five minutes. TIMEOUT: the number of seconds, on an idle
# machine, after which an entry is ended. A loaded or slow machine gets more time (tests/support/limits/patience.h).
# CLOCK: a filter, as --gtest_filter takes it, for the cases that depend on limits, kills or orders. These cases have
# the label `clock` (docs/testing.md). In a WHOLE program they are a separate entry, <name>_clock, and "*" stands for
# all cases. SHARDS: the cases of CLOCK in a WHOLE program are n entries, <name>_clock_1 to <name>_clock_n, since cases
# that wait for limits may wait at the same time.
#
# IN: the test shares a program with others, and its ctest entries are still its own. Most of a test's
# compilation is headers, and files of one program are compiled many at a time (TESSERA_BATCHES). So names of a file lie
# in a namespace of the file's name.
function(tessera_test name)
  cmake_parse_arguments(ARG "FAST;WHOLE;TORCH;ALONE" "TIMEOUT;CLOCK;SHARDS;IN" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(ARG_FAST)
    list(APPEND ARG_LABELS fast)
  endif()
  if(name IN_LIST TESSERA_TESTS_OF_TORCH)
    list(APPEND ARG_LABELS torch)
  endif()
  set(alone OFF)
  if(ARG_ALONE)
    set(alone ON)
  endif()
  set(program ${name})
  set(main GTest::gtest_main)
  set(which)
  if(ARG_IN)
    set(program ${ARG_IN})
    set(main tests_by_file)
    list(TRANSFORM ARG_SOURCES REPLACE ".*/" "" OUTPUT_VARIABLE files)
    list(JOIN files "," which)
    add_custom_target(${name} DEPENDS ${program})
  endif()
  if(NOT TARGET ${program})
    add_executable(${program})
    target_link_libraries(${program} PRIVATE test_patience GTest::gmock ${main} tessera_options)
    add_dependencies(${program} with_patience)
    # A test's own code runs only for a short time, so the time that the compiler saves is worth more than faster
    # tests. Its lines are known to debuggers in other builds, and to sanitizers.
    set(quick -O1)
    if(NOT TESSERA_SANITIZE)
      list(APPEND quick -g0)
    endif()
    target_compile_options(${program} PRIVATE "$<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:CXX>>:${quick}>")
    if(ARG_TORCH)
      tessera_use_torch_pch(${program})
    else()
      tessera_std_pch(tessera_test_pch <gmock/gmock.h> <gtest/gtest.h> <random> LINK GTest::gmock)
      target_precompile_headers(${program} REUSE_FROM tessera_test_pch)
    endif()
    tessera_compile_in_batches(${program} 12)
  endif()
  target_sources(${program} PRIVATE ${ARG_SOURCES})
  target_link_libraries(${program} PRIVATE ${ARG_LINK})
  if(NOT ARG_CLOCK)
    tessera_test_entries(${name} "*" ${ARG_LABELS})
  elseif(ARG_CLOCK STREQUAL "*")
    tessera_test_entries(${name} "*" ${ARG_LABELS} clock)
  else()
    if(ARG_SHARDS)
      foreach(shard RANGE 1 ${ARG_SHARDS})
        math(EXPR index "${shard} - 1")
        tessera_test_entries(${name}_clock_${shard} "${ARG_CLOCK}" ${ARG_LABELS} clock)
        set_tests_properties(${name}_clock_${shard} PROPERTIES
          ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${index}")
      endforeach()
    else()
      tessera_test_entries(${name}_clock "${ARG_CLOCK}" ${ARG_LABELS} clock)
    endif()
    set(alone OFF)
    tessera_test_entries(${name} "-${ARG_CLOCK}" ${ARG_LABELS})
  endif()
  if(name IN_LIST TESSERA_TESTS_OF_TORCH)
    add_dependencies(torch_tests ${program})
  endif()
endfunction()

# tessera_test_entries(<entry> <filter> [label...]): makes ctest entries of the cases of tessera_test's program that the
# filter names. It reads that function's variables.
function(tessera_test_entries entry filter)
  math(EXPR cost "${ARG_TIMEOUT} / 10")  # tests that may take long begin first, since at the end they would run alone
  if(ARG_WHOLE)  # one ctest entry for the whole file, if starting processes costs more than the cases do
    set(flags)
    if(which)
      list(APPEND flags "--of=${which}")
    endif()
    if(NOT filter STREQUAL "*")
      list(APPEND flags "--gtest_filter=${filter}")
    endif()
    add_test(NAME ${entry} COMMAND with_patience ${ARG_TIMEOUT} $<TARGET_FILE:${program}> ${flags})
    set_tests_properties(${entry} PROPERTIES REQUIRED_FILES $<TARGET_FILE:${program}> RUN_SERIAL ${alone} COST ${cost} LABELS "${ARGN}")
  else()
    list(JOIN ARGN "\\;" labels)  # in the form that gtest_discover_tests takes
    set(launcher "${PROJECT_BINARY_DIR}/tests/support/with_patience;${ARG_TIMEOUT}")
    if(which)  # CMake before 3.31 gives a program no option when it asks for the program's tests
      string(PREPEND launcher "/usr/bin/env;TESTS_OF=${which};")
    endif()
    set_target_properties(${program} PROPERTIES CROSSCOMPILING_EMULATOR "${launcher}")
    gtest_discover_tests(${program} DISCOVERY_TIMEOUT 60 TEST_FILTER "${filter}" PROPERTIES RUN_SERIAL ${alone} COST ${cost} LABELS "${labels}")
  endif()
endfunction()
