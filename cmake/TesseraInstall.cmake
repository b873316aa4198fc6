# `cmake --install` puts the library, its public headers, the command and a package config where find_package(Tessera)
# finds them. A user links tessera::tessera, installed or not (FetchContent), and sees include/tessera and LibTorch. The
# layers are linked too, but users do not see their include folders and their packages.
add_library(tessera_all INTERFACE)
target_include_directories(tessera_all INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(tessera_all INTERFACE cxx_std_20)
if(TESSERA_SHARED)
  target_link_libraries(tessera_all INTERFACE tessera_shared tessera::torch)
else()
  target_link_libraries(tessera_all INTERFACE $<LINK_ONLY:tessera_engine> tessera::torch)
endif()
set_target_properties(tessera_all PROPERTIES EXPORT_NAME tessera)
add_library(tessera::tessera ALIAS tessera_all)

if(NOT TESSERA_INSTALL)
  return()
endif()
include(CMakePackageConfigHelpers)
include(TesseraPkgConfig)

set(tessera_installed_layers "")
tessera_layers_below(tessera_engine tessera_installed_layers)
set(tessera_libtorch_runpath ${TESSERA_TORCH_ROOT}/lib)
if(TARGET tessera::cudart)
  cmake_path(GET TESSERA_CUDART PARENT_PATH tessera_cudart_folder)
  list(APPEND tessera_libtorch_runpath ${tessera_cudart_folder})
endif()
if(TESSERA_SHARED)
  set_target_properties(tessera_shared PROPERTIES INSTALL_RPATH "${tessera_libtorch_runpath}")
  install(TARGETS tessera_all tessera_shared EXPORT TesseraTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
else()
  install(TARGETS tessera_all ${tessera_installed_layers} EXPORT TesseraTargets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TESSERA_HAVE_MPI)
  set_target_properties(tessera_mpi PROPERTIES INSTALL_RPATH "${tessera_libtorch_runpath}")
  install(TARGETS tessera_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
list(REVERSE tessera_installed_layers)  # a linker wants an archive before the archives that it uses
tessera_pkg_config(${tessera_installed_layers})
# The command finds the LibTorch with which it was linked, and CUDA's runtime beside it; or it finds libraries in the
# prefix.
if(TESSERA_PROGRAMS)
  get_property(tessera_parts GLOBAL PROPERTY TESSERA_PARTS)
  set_target_properties(${tessera_parts} PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${tessera_libtorch_runpath}")
  install(TARGETS tessera ${tessera_parts} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(tessera_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
install(EXPORT TesseraTargets NAMESPACE tessera:: DESTINATION ${tessera_cmake_dir})
configure_package_config_file(cmake/TesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/TesseraConfig.cmake
  INSTALL_DESTINATION ${tessera_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TesseraConfig.cmake ${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
  cmake/TesseraTorch.cmake cmake/TesseraUring.cmake DESTINATION ${tessera_cmake_dir})
