# libtessera.so: the engine and the layers below it in one shared library. All programs and libraries of one process
# that link it have one copy of the layers, and of their registries and caches.
option(TESSERA_SHARED "Build and install libtessera.so in place of the archives" OFF)

# Appends `target` to the list `result`, and before it the layers on which it depends, each of them once. Layers that
# depend on `target` are not in the list: with tessera_engine, none of the command's own (app, launch, models, ...).
function(tessera_layers_below target result)
  get_property(every_layer GLOBAL PROPERTY TESSERA_LAYERS)
  get_target_property(links ${target} LINK_LIBRARIES)
  foreach(link ${links})
    if(link IN_LIST every_layer AND NOT link IN_LIST ${result})
      tessera_layers_below(${link} ${result})
    endif()
  endforeach()
  set(${result} ${${result}} ${target} PARENT_SCOPE)
endfunction()

# tessera_stands_on_engine(<variable> <target>...): returns whether one of the targets depends on the engine. Targets
# that do not depend on it do not load LibTorch.
function(tessera_stands_on_engine result)
  set(below "")
  foreach(target ${ARGN})
    tessera_layers_below(${target} below)
  endforeach()
  set(${result} OFF PARENT_SCOPE)
  if(tessera_engine IN_LIST below)
    set(${result} ON PARENT_SCOPE)
  endif()
endfunction()

# tessera_shared_library(<target>): makes libtessera.so by linking the archives. It compiles nothing. Users of the
# library link it before the archives. It contains all archives as a whole, so the linker takes nothing more from them.
function(tessera_shared_library target)
  set(layers "")
  tessera_layers_below(tessera_engine layers)
  list(JOIN layers "," layers)
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/${target}.cc CONTENT "")
  add_library(${target} SHARED ${PROJECT_BINARY_DIR}/${target}.cc)
  target_link_libraries(${target} PRIVATE tessera_engine tessera_options)
  # A minor version may change the interface (docs/compatibility.md).
  set_target_properties(${target} PROPERTIES OUTPUT_NAME tessera LINK_LIBRARY_OVERRIDE "WHOLE_ARCHIVE,${layers}"
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} LINKER_LANGUAGE CXX)
endfunction()

if(TESSERA_SHARED)
  tessera_shared_library(tessera_shared)
endif()
