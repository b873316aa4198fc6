# The wheel: the package `tessera` for Python and for C++, as install components "wheel" and
# "wheel_module" (the extension), and target tessera_wheel.
# scripts/wheel and `pip install ./python` make it (python/Wheel.cmake). Its libraries and programs are linked again
# from the objects of this build:
#
#   tessera/                    the Python files, and the extension
#   tessera/lib                 libtessera.so, shared by the extension and all programs; a CMake package; tessera.pc
#   tessera/include/tessera     the public headers
#   tessera/bin                 the tessera command and its parts
#
# LibTorch and CUDA's runtime come from the torch package, which lies beside it in site-packages.
include(CMakePackageConfigHelpers)
set(tessera_wheel_build ${PROJECT_BINARY_DIR}/wheel)
set(tessera_minor ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(tessera_wheel_rpath $ORIGIN/../../torch/lib)
if(TARGET tessera::cudart)
  cmake_path(GET TESSERA_TORCH_ROOT PARENT_PATH tessera_site_packages)
  cmake_path(GET TESSERA_CUDART PARENT_PATH tessera_cudart_folder)
  cmake_path(RELATIVE_PATH tessera_cudart_folder BASE_DIRECTORY ${tessera_site_packages})
  if(NOT tessera_cudart_folder MATCHES "^\\.\\.")
    list(APPEND tessera_wheel_rpath $ORIGIN/../../${tessera_cudart_folder})
  endif()
endif()

# A wheel cannot have symbolic links, so the file's name is its SONAME.
tessera_shared_library(tessera_wheel_library)
set_target_properties(tessera_wheel_library PROPERTIES EXCLUDE_FROM_ALL ON VERSION ${tessera_minor} INSTALL_RPATH "${tessera_wheel_rpath}"
  BUILD_WITH_INSTALL_RPATH ON LIBRARY_OUTPUT_DIRECTORY ${tessera_wheel_build}/lib)

# tessera_relink(<new target> <target> <output name> <rpath>...): links the objects of a program or module with
# libtessera.so.
function(tessera_relink new target name)
  get_target_property(type ${target} TYPE)
  get_target_property(links ${target} LINK_LIBRARIES)
  list(REMOVE_ITEM links tessera_shared)
  if(type STREQUAL EXECUTABLE)
    add_executable(${new} EXCLUDE_FROM_ALL $<TARGET_OBJECTS:${target}>)
  else()
    add_library(${new} MODULE EXCLUDE_FROM_ALL $<TARGET_OBJECTS:${target}>)
    set_target_properties(${new} PROPERTIES PREFIX "" SUFFIX "")
  endif()
  target_link_libraries(${new} PRIVATE tessera_wheel_library ${links})
  set_target_properties(${new} PROPERTIES OUTPUT_NAME ${name} LINKER_LANGUAGE CXX BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${ARGN}"
    RUNTIME_OUTPUT_DIRECTORY ${tessera_wheel_build}/bin LIBRARY_OUTPUT_DIRECTORY ${tessera_wheel_build})
endfunction()

tessera_relink(tessera_wheel_module tessera_python _native.${Python_SOABI}.so $ORIGIN/lib)

# The extension for another Python, whose torch has the same version. Nothing else in a wheel depends on Python. The
# headers of both torch packages are equal, and so are the names of their libraries.
set(TESSERA_WHEEL_PYTHON "" CACHE FILEPATH "Another Python with the same torch, for which the wheel's extension is compiled, too")
function(tessera_extension_of_other_python python)
  execute_process(COMMAND ${python} -c "import sysconfig as s; print(s.get_path('include'), '_native' + s.get_config_var('EXT_SUFFIX'), sep=';', end='')"
    OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
  list(GET found 0 headers)
  list(GET found 1 name)
  get_target_property(sources tessera_python SOURCES)
  get_target_property(folder tessera_python SOURCE_DIR)
  get_target_property(links tessera_python LINK_LIBRARIES)
  list(TRANSFORM sources PREPEND ${folder}/)
  list(FILTER links EXCLUDE REGEX "Python::|^tessera_shared$")
  add_library(tessera_other_python OBJECT EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(tessera_other_python PRIVATE ${links})
  target_include_directories(tessera_other_python SYSTEM PRIVATE ${headers})
  target_compile_options(tessera_other_python PRIVATE -Wno-attributes)
  set_target_properties(tessera_other_python PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
  tessera_relink(tessera_wheel_other_module tessera_other_python ${name} $ORIGIN/lib)
  install(TARGETS tessera_wheel_other_module LIBRARY DESTINATION tessera COMPONENT wheel_other_module EXCLUDE_FROM_ALL)
endfunction()
if(EXISTS "${TESSERA_WHEEL_PYTHON}")  # the cache may name a Python that was removed since
  tessera_extension_of_other_python(${TESSERA_WHEEL_PYTHON})
endif()
# `tessera` and other programs that do not use the engine are copied unchanged: they start without loading LibTorch.
get_property(tessera_parts GLOBAL PROPERTY TESSERA_PARTS)
set(tessera_wheel_programs "")
foreach(program tessera ${tessera_parts})
  tessera_stands_on_engine(shares ${program})
  if(shares)
    tessera_relink(${program}-wheel ${program} ${program} $ORIGIN/../lib ${tessera_wheel_rpath})
    list(APPEND tessera_wheel_programs ${program}-wheel)
  else()
    list(APPEND tessera_wheel_programs ${program})
  endif()
endforeach()
add_custom_target(tessera_wheel_files DEPENDS tessera_wheel_library ${tessera_wheel_programs})
add_custom_target(tessera_wheel DEPENDS tessera_wheel_files tessera_wheel_module)

# Builds with CMake and with pkg-config look for these files.
include(${PROJECT_SOURCE_DIR}/python/TorchVersion.cmake)
tessera_version_of_torch(${TESSERA_TORCH_ROOT} tessera_torch_version)
tessera_minor_of_torch(${tessera_torch_version} tessera_torch_minor)
configure_file(${CMAKE_CURRENT_LIST_DIR}/TesseraWheelConfig.cmake.in ${tessera_wheel_build}/TesseraConfig.cmake @ONLY)
write_basic_package_version_file(${tessera_wheel_build}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
function(tessera_wheel_pkg_config)
  set(CMAKE_INSTALL_LIBDIR lib)
  set(CMAKE_INSTALL_INCLUDEDIR include)
  set(TESSERA_TORCH_ROOT \${prefix}/../torch)
  set(tessera_pc_to_prefix ../..)
  set(tessera_pc_requires "")
  set(tessera_pc_libraries "-l:libtessera.so.${tessera_minor} -Wl,-rpath,\${libdir}")
  set(tessera_pc_torch "-ltorch_cpu -lc10")
  if(TARGET tessera::torch_cuda)
    string(PREPEND tessera_pc_torch "-ltorch_cuda -lc10_cuda ")
  endif()
  get_target_property(definitions tessera::torch INTERFACE_COMPILE_DEFINITIONS)
  list(TRANSFORM definitions PREPEND -D)
  list(JOIN definitions " " tessera_pc_definitions)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/tessera.pc.in ${tessera_wheel_build}/tessera.pc @ONLY)
endfunction()
tessera_wheel_pkg_config()

# Only the wheel has these files.
set(in_wheel COMPONENT wheel EXCLUDE_FROM_ALL)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/python/tessera DESTINATION . ${in_wheel} PATTERN __pycache__ EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/python/_tessera_command.py DESTINATION . ${in_wheel})
install(FILES ${PROJECT_BINARY_DIR}/python/tessera/_built_with.py DESTINATION tessera ${in_wheel})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION tessera ${in_wheel})
# The wheel contains parts of these packages, whose licences must be named. On Debian the licences lie here.
foreach(package libabsl-dev libcli11-dev libfmt-dev libpcre2-dev libspdlog-dev liburing-dev libutf8proc-dev libxxhash-dev nlohmann-json3-dev)
  install(FILES /usr/share/doc/${package}/copyright DESTINATION tessera/licenses RENAME ${package}.txt OPTIONAL ${in_wheel})
endforeach()
install(TARGETS tessera_wheel_module LIBRARY DESTINATION tessera COMPONENT wheel_module EXCLUDE_FROM_ALL)
install(TARGETS tessera_wheel_library LIBRARY DESTINATION tessera/lib NAMELINK_SKIP ${in_wheel})
install(TARGETS ${tessera_wheel_programs} RUNTIME DESTINATION tessera/bin ${in_wheel})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera DESTINATION tessera/include ${in_wheel})
install(FILES ${tessera_wheel_build}/TesseraConfig.cmake ${tessera_wheel_build}/TesseraConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/TesseraTorch.cmake ${PROJECT_SOURCE_DIR}/python/TorchVersion.cmake
  DESTINATION tessera/lib/cmake/Tessera ${in_wheel})
install(FILES ${tessera_wheel_build}/tessera.pc DESTINATION tessera/lib/pkgconfig ${in_wheel})
