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
  endif()
  if(ARG_WHOLE)  # one ctest entry for the whole file, where starting the process costs more than the cases do
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL ${alone} LABELS "${ARG_LABELS}")
  else()
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL ${alone} LABELS "${ARG_LABELS}")
  endif()
endfunction()
