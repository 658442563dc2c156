# What `cmake --install` puts where, below one prefix that may be moved afterwards:
#
#   bin/strata
#   include/strata/                the ABI; libs/plugin_kit/ in it is for plugins in C++
#   lib/libstrata.so*              links, for linkers and loaders, to
#   lib/strata/libstrata.so.0      the library, with its plugins/ beside it, as strata.h says
#   lib/strata/plugins/            *.so and *.toml
#   lib/cmake/Strata, lib/pkgconfig
include(CMakePackageConfigHelpers)
set(STRATA_INSTALL_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Strata)
get_target_property(soversion strata SOVERSION)
set(STRATA_SONAME libstrata.so.${soversion})
set(STRATA_INSTALL_LIBRARY ${STRATA_INSTALL_LIBRARY_DIR}/${STRATA_SONAME})
set(package ${CMAKE_BINARY_DIR}/package)

file(RELATIVE_PATH bin_to_library /${CMAKE_INSTALL_BINDIR} /${STRATA_INSTALL_LIBRARY_DIR})
set_target_properties(strata_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_library}")
install(TARGETS strata_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS strata LIBRARY DESTINATION ${STRATA_INSTALL_LIBRARY_DIR})
file(MAKE_DIRECTORY ${package})
foreach(link libstrata.so ${STRATA_SONAME})
  file(CREATE_LINK strata/${STRATA_SONAME} ${package}/${link} SYMBOLIC)
  install(FILES ${package}/${link} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endforeach()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/abi/strata DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/libs/plugin_kit DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/strata/libs
        FILES_MATCHING PATTERN *.h)

configure_package_config_file(cmake/StrataConfig.cmake.in ${package}/StrataConfig.cmake
                              INSTALL_DESTINATION ${STRATA_INSTALL_CMAKE_DIR}
                              PATH_VARS CMAKE_INSTALL_INCLUDEDIR STRATA_INSTALL_PLUGIN_DIR STRATA_INSTALL_LIBRARY)
write_basic_package_version_file(${package}/StrataConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${package}/StrataConfig.cmake ${package}/StrataConfigVersion.cmake cmake/StrataPlugin.cmake
              cmake/StrataCheckExports.cmake cmake/plugin.map DESTINATION ${STRATA_INSTALL_CMAKE_DIR})
file(RELATIVE_PATH STRATA_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/strata.pc.in ${package}/strata.pc @ONLY)
install(FILES ${package}/strata.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
