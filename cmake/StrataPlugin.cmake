# One plugin: in this tree, and in any project that calls find_package(Strata).
#
# strata_add_plugin(NAME [NODELETE] [NO_INSTALL] SOURCES a.c ... [LIBS ...])
#   The target NAME is NAME.so beside NAME.toml (from the caller's folder), in STRATA_PLUGIN_DIR, which is plugins/ of the
#   build folder unless the project sets it. It exports one symbol, checked after linking; only then is the TOML put
#   beside it, so that a plugin that was not built is not found. cmake --install puts both where
#   STRATA_INSTALL_PLUGIN_DIR says, unless NO_INSTALL says that only tests use it. NODELETE is for libraries that must
#   never be unmapped.
function(strata_add_plugin name)
  cmake_parse_arguments(arg "NODELETE;NO_INSTALL" "" "SOURCES;LIBS" ${ARGN})
  if(NOT STRATA_PLUGIN_DIR)
    set(STRATA_PLUGIN_DIR ${CMAKE_BINARY_DIR}/plugins)
  endif()
  file(REMOVE ${STRATA_PLUGIN_DIR}/${name}.absent)
  set(here ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  set(toml ${CMAKE_CURRENT_SOURCE_DIR}/${name}.toml)
  add_library(${name} MODULE ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY ${STRATA_PLUGIN_DIR}
                        C_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                        LINK_DEPENDS "${here}/plugin.map;${toml}")
  # strata_options: the warnings and sanitizers of Strata's own tree.
  target_link_libraries(${name} PRIVATE $<TARGET_NAME_IF_EXISTS:strata_options> strata::abi ${arg_LIBS})
  # Contraction off: a fused multiply-add on one machine and not on another is a different number.
  target_compile_options(${name} PRIVATE -ffp-contract=off $<$<COMPILE_LANGUAGE:CXX>:-fno-gnu-unique>)
  target_link_options(${name} PRIVATE -Wl,--version-script=${here}/plugin.map)
  if(arg_NODELETE)
    target_link_options(${name} PRIVATE -Wl,-z,nodelete)
  endif()
  add_custom_command(TARGET ${name} POST_BUILD VERBATIM
                     COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DLIBRARY=$<TARGET_FILE:${name}>
                             -P ${here}/StrataCheckExports.cmake
                     COMMAND ${CMAKE_COMMAND} -E copy ${toml} ${STRATA_PLUGIN_DIR}/${name}.toml
                     BYPRODUCTS ${STRATA_PLUGIN_DIR}/${name}.toml)
  if(NOT arg_NO_INSTALL)
    install(TARGETS ${name} LIBRARY DESTINATION ${STRATA_INSTALL_PLUGIN_DIR})
    install(FILES ${name}.toml DESTINATION ${STRATA_INSTALL_PLUGIN_DIR})
  endif()
endfunction()

# strata_plugin_not_built(NAME WHY): NAME.absent in its place, so that the error of a run that wants the plugin says WHY.
function(strata_plugin_not_built name why)
  file(WRITE ${STRATA_PLUGIN_DIR}/${name}.absent "${why}\n")
  install(FILES ${STRATA_PLUGIN_DIR}/${name}.absent DESTINATION ${STRATA_INSTALL_PLUGIN_DIR})
endfunction()
