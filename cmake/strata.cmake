# Helpers of the build: one set of compile options, and one function per kind of target.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()

# One layout for users: bin/ holds programs, lib/ the core, lib/plugins/ each plugin beside its TOML.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(STRATA_PLUGIN_DIR ${CMAKE_BINARY_DIR}/lib/plugins)
# An installation has the same in a folder of its own: lib/strata/ (cmake/install.cmake).
include(GNUInstallDirs)
set(STRATA_INSTALL_LIBRARY_DIR ${CMAKE_INSTALL_LIBDIR}/strata)
set(STRATA_INSTALL_PLUGIN_DIR ${STRATA_INSTALL_LIBRARY_DIR}/plugins)

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)

# Contraction stays off everywhere: a fused multiply-add on one machine and not on another is a different number.
add_library(strata_options INTERFACE)
target_compile_options(strata_options INTERFACE -Wall -Wextra -Wshadow -Werror -ffp-contract=off)
# g++ 12 sees overlaps that are not there in inlined std::string code at -O3 (its bug 105651).
target_compile_options(strata_options INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
if(STRATA_SANITIZE)
  # Instrumented code draws warnings that are not true (array bounds, in the standard library): GCC's manual says so.
  target_compile_options(strata_options INTERFACE -fsanitize=${STRATA_SANITIZE} -fno-omit-frame-pointer -Wno-error)
  target_link_options(strata_options INTERFACE -fsanitize=${STRATA_SANITIZE})
else()
  target_link_options(strata_options INTERFACE -Wl,-z,defs)
endif()
target_link_libraries(strata_options INTERFACE Threads::Threads)

include(StrataPlugin)

# strata_add_test(NAME SOURCES a.cc ... [LIBS ...] [LABELS ...] [TIMEOUT s])
# A GoogleTest program; every test in it is one ctest entry with a deadline.
function(strata_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  if(STRATA_SANITIZE)
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 4")
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE strata_options strata_test_support ${arg_LIBS} GTest::gmock GTest::gtest_main)
  # Test code is compiled often and run once.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  target_compile_definitions(${name} PRIVATE STRATA_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                             STRATA_BUILD_DIR="${CMAKE_BINARY_DIR}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  # Names of parameters are in the names of tests; their bytes say nothing.
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST NO_PRETTY_VALUES
                       PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
endfunction()
