# Run after a plugin is linked, with NM and LIBRARY: it exports strata_plugin_entry_v1 and nothing else.
execute_process(COMMAND ${NM} -D --defined-only ${LIBRARY} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL " [^A ] [^\n]+" symbols "${symbols}")  # "A": the name of a symbol version
list(TRANSFORM symbols REPLACE "^ . ([^@\n]+).*" "\\1")
if(NOT symbols STREQUAL "strata_plugin_entry_v1")
  file(REMOVE ${LIBRARY})
  message(FATAL_ERROR "${LIBRARY} must export strata_plugin_entry_v1 and nothing else; it exports: ${symbols}")
endif()
