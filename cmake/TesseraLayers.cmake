option(TESSERA_BATCHES "Compile sources several at a time: fast from nothing, slow after a change" OFF)

function(tessera_compile_in_batches target)
  if(TESSERA_BATCHES)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
    # A batch is not a header, so an unnamed namespace in it is no mistake.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# tessera_use_std_pch(<target>...): compiles targets without LibTorch with one shared precompiled header of the standard library,
# Abseil's status, fmt and JSON, which are most of what such a file reads. Sources still include what they use.
function(tessera_use_std_pch)
  if(NOT TARGET tessera_std_pch)
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/tessera_std_pch.cc CONTENT "")
    add_library(tessera_std_pch OBJECT ${PROJECT_BINARY_DIR}/tessera_std_pch.cc)
    target_link_libraries(tessera_std_pch PRIVATE absl::status absl::statusor absl::strings fmt::fmt nlohmann_json::nlohmann_json tessera_options)
    target_precompile_headers(tessera_std_pch PRIVATE
      <absl/status/status.h> <absl/status/statusor.h> <fmt/format.h> <nlohmann/json.hpp>
      <algorithm> <array> <atomic> <bit> <chrono> <cmath> <cstdint> <cstring> <filesystem> <functional> <map> <memory> <mutex>
      <optional> <set> <span> <string> <string_view> <thread> <utility> <vector>)
  endif()
  foreach(target ${ARGN})
    target_precompile_headers(${target} REUSE_FROM tessera_std_pch)
    tessera_compile_in_batches(${target})
  endforeach()
endfunction()

# tessera_layer(<name> SOURCES <file>... [LINK <target>...])
#
# Declares the layer tessera_<name>. Sources are listed one by one; what a layer may include is what it links.
# All includes are written from the root of the tree ("sharding/unit.h"), so the layer of a header is its folder.
function(tessera_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(tessera_${name} STATIC ${ARG_SOURCES})
  target_include_directories(tessera_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  target_link_libraries(tessera_${name} PUBLIC ${ARG_LINK} PRIVATE $<BUILD_INTERFACE:tessera_options>)
  tessera_use_std_pch(tessera_${name})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYERS tessera_${name})
endfunction()

# tessera_test(<name> SOURCES <file>... LINK <target>... [LABELS ...] [TIMEOUT s] [WHOLE] [TORCH] [ALONE])
#
# One GoogleTest executable, registered as one ctest entry per test case, or WHOLE: one for all. TORCH: it includes
# LibTorch's headers. ALONE: no other test runs beside it, since it looks how soon something is noticed.
function(tessera_test name)
  cmake_parse_arguments(ARG "WHOLE;TORCH;ALONE" "TIMEOUT" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  set(alone OFF)
  if(ARG_ALONE)
    set(alone ON)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gmock GTest::gtest_main tessera_options)
  if(ARG_TORCH)
    tessera_use_torch_pch(${name})
  else()
    tessera_use_std_pch(${name})
  endif()
  if(ARG_WHOLE)  # one ctest entry for the whole file, where starting the process costs more than the cases do
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL ${alone} LABELS "${ARG_LABELS}")
  else()
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL ${alone} LABELS "${ARG_LABELS}")
  endif()
endfunction()
