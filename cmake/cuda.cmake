# Whether the CUDA plugins are built: STRATA_CUDA is AUTO (where there is a CUDA compiler), ON (it is required) or OFF.
# Sets STRATA_HAVE_CUDA, or STRATA_NO_CUDA to why not. Nothing of CUDA is looked for when OFF, and no other target depends on it.
set(STRATA_CUDA AUTO CACHE STRING "CUDA plugins: AUTO (where there is a CUDA compiler), ON (required) or OFF")
set_property(CACHE STRATA_CUDA PROPERTY STRINGS AUTO ON OFF)
set(STRATA_HAVE_CUDA OFF)
if(NOT STRATA_CUDA STREQUAL "AUTO" AND NOT STRATA_CUDA)
  set(STRATA_NO_CUDA "this build was configured without CUDA, STRATA_CUDA=${STRATA_CUDA}")
  return()
endif()

# Toolkits often lie beside PATH. The variable, not CMAKE_CUDA_COMPILER: a compiler that was given is not tried out.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(STRATA_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(STRATA_NVCC)
  if(STRATA_NVCC)
    set(ENV{CUDACXX} ${STRATA_NVCC})
  endif()
endif()
# Every generation since the first with bf16; PTX of the newest serves those after it.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
endif()

# Without the plugins: an error where they are required, a line in the log else.
macro(strata_no_cuda why)
  if(NOT STRATA_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "STRATA_CUDA=${STRATA_CUDA}, but ${why}: put nvcc on PATH or set CMAKE_CUDA_COMPILER, or "
                        "configure with STRATA_CUDA=AUTO to go without")
  endif()
  message(STATUS "CUDA plugins: not built, ${why}")
  set(STRATA_NO_CUDA "${why} (STRATA_CUDA=AUTO; ON requires one of CUDA 12.8 or newer)")
endmacro()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  strata_no_cuda("no CUDA compiler works here")
  return()
endif()
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
string(REGEX REPLACE ".*release ([0-9]+[.][0-9]+).*" "\\1" nvcc_version "${nvcc_version}")
if(nvcc_version VERSION_LESS 12.8)  # the first that knows compute capability 10.0
  strata_no_cuda("${CMAKE_CUDA_COMPILER} is of CUDA ${nvcc_version}, 12.8 is needed")
  return()
endif()

enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)  # CMake 3.25 knows no later one for nvcc
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
if(CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
find_package(CUDAToolkit REQUIRED)
set(STRATA_HAVE_CUDA ON)
message(STATUS "CUDA plugins: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, for ${CMAKE_CUDA_ARCHITECTURES}")

# strata_add_cuda_kernels(NAME SOURCES a.cu ... [LIBS ...])
# Kernels and their launch functions, to link into a plugin. The flags are the numbers contract: every operation is
# rounded once, to nearest, and subnormals are numbers.
function(strata_add_cuda_kernels name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE strata_abi ${arg_LIBS} PUBLIC CUDA::cudart_static)
  target_compile_options(${name} PRIVATE --fmad=false --ftz=false --prec-div=true --prec-sqrt=true
                         --Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off,-Wno-unused-function)
endfunction()
