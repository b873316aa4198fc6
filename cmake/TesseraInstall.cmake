# `cmake --install` puts the library, its headers, the command and a package config where find_package(Tessera) finds
# them. A user links tessera::tessera.
include(CMakePackageConfigHelpers)

add_library(tessera_all INTERFACE)
target_link_libraries(tessera_all INTERFACE tessera_engine tessera_data)
set_target_properties(tessera_all PROPERTIES EXPORT_NAME tessera)
add_library(tessera::tessera ALIAS tessera_all)

get_property(tessera_layers GLOBAL PROPERTY TESSERA_LAYERS)
install(TARGETS tessera_all ${tessera_layers} EXPORT TesseraTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# Public headers name things of the layers below; those headers come along under a folder of their own.
foreach(folder runtime/base runtime/config runtime/comm runtime/data sharding/layout models)
  install(DIRECTORY ${folder}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera/internal/${folder}
    FILES_MATCHING PATTERN "*.h" PATTERN "gloo_stubs" EXCLUDE)
endforeach()
install(TARGETS tessera RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

set(tessera_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
install(EXPORT TesseraTargets NAMESPACE tessera:: DESTINATION ${tessera_cmake_dir})
configure_package_config_file(cmake/TesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/TesseraConfig.cmake
  INSTALL_DESTINATION ${tessera_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TesseraConfig.cmake ${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
  cmake/TesseraTorch.cmake DESTINATION ${tessera_cmake_dir})
