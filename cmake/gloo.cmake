# Finds Gloo, the library of collectives under the transport between workers (tfpar_ops/transport).
#
# Sets TFPAR_HAVE_GLOO, TFPAR_GLOO_VERSION, TFPAR_GLOO_INCLUDES and TFPAR_GLOO_LIBRARY. GLOO_HOME says where to look first.
set(TFPAR_HAVE_GLOO FALSE)
if(TFPAR_GLOO STREQUAL "0")
  set(problem "TFPAR_GLOO=0")
else()
  unset(TFPAR_GLOO_INCLUDE CACHE)  # another one may be named than the last time
  unset(TFPAR_GLOO_LIBRARY CACHE)
  find_path(TFPAR_GLOO_INCLUDE gloo/config.h HINTS "$ENV{GLOO_HOME}/include")
  find_library(TFPAR_GLOO_LIBRARY gloo HINTS "$ENV{GLOO_HOME}/lib")
  set(problem "Gloo was not found (GLOO_HOME, the system; Debian and Ubuntu: apt-get install libgloo-dev)")
  if(TFPAR_GLOO_INCLUDE AND TFPAR_GLOO_LIBRARY)
    file(STRINGS ${TFPAR_GLOO_INCLUDE}/gloo/config.h lines REGEX "define GLOO_VERSION_(MAJOR|MINOR|PATCH) ")
    list(TRANSFORM lines REPLACE "[^0-9]+" "" OUTPUT_VARIABLE numbers)
    list(JOIN numbers "." TFPAR_GLOO_VERSION)
    set(TFPAR_GLOO_INCLUDES ${TFPAR_GLOO_INCLUDE})
    if(NOT EXISTS ${TFPAR_GLOO_INCLUDE}/gloo/common/memory.h)
      list(APPEND TFPAR_GLOO_INCLUDES ${CMAKE_CURRENT_LIST_DIR}/../tfpar_ops/transport/gloo_missing)
    endif()
    # adopted_pairs.cc uses what is not part of Gloo's interface, and Gloo's version number has stayed the same for years.
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
    try_compile(compiles SOURCES ${CMAKE_CURRENT_LIST_DIR}/../tfpar_ops/transport/adopted_pairs.cc NO_CACHE
      CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_LIST_DIR}/..;${TFPAR_GLOO_INCLUDES}"
      CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON OUTPUT_VARIABLE output)
    unset(CMAKE_TRY_COMPILE_TARGET_TYPE)
    if(compiles)
      set(TFPAR_HAVE_GLOO TRUE)
    else()
      string(REGEX MATCH "[^\n]*error: [^\n]*" problem "${output}")
      set(problem "Gloo ${TFPAR_GLOO_VERSION} at ${TFPAR_GLOO_INCLUDE} differs from what the transport is written for: ${problem}")
    endif()
  endif()
endif()

if(TFPAR_HAVE_GLOO)
  message(STATUS "tfpar_ops: transport: Gloo ${TFPAR_GLOO_VERSION}")
elseif(TFPAR_GLOO STREQUAL "1")
  message(FATAL_ERROR "TFPAR_GLOO=1, but ${problem}.")
else()
  message(STATUS "tfpar_ops: no transport of its own: ${problem}")
endif()
