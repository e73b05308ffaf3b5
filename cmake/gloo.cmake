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
    if(TFPAR_GLOO_VERSION MATCHES "^0\\.5\\." AND EXISTS ${TFPAR_GLOO_INCLUDE}/gloo/transport/tcp/listener.h)
      # Its version number has stayed the same. Its devices listen by themselves (adopted_pairs.cc).
      set(problem "Gloo at ${TFPAR_GLOO_INCLUDE} is of May 2023 or later; the transport is written for that of Debian 12")
    elseif(TFPAR_GLOO_VERSION MATCHES "^0\\.5\\.")
      set(TFPAR_HAVE_GLOO TRUE)
    else()
      set(problem "Gloo ${TFPAR_GLOO_VERSION} at ${TFPAR_GLOO_INCLUDE} is not 0.5, which the transport is written for")
    endif()
  endif()
endif()

set(TFPAR_GLOO_INCLUDES ${TFPAR_GLOO_INCLUDE})
if(TFPAR_HAVE_GLOO AND NOT EXISTS ${TFPAR_GLOO_INCLUDE}/gloo/common/memory.h)
  list(APPEND TFPAR_GLOO_INCLUDES ${CMAKE_CURRENT_LIST_DIR}/../tfpar_ops/transport/gloo_missing)
endif()

if(TFPAR_HAVE_GLOO)
  message(STATUS "tfpar_ops: transport: Gloo ${TFPAR_GLOO_VERSION}")
elseif(TFPAR_GLOO STREQUAL "1")
  message(FATAL_ERROR "TFPAR_GLOO=1, but ${problem}.")
else()
  message(STATUS "tfpar_ops: no transport of its own: ${problem}")
endif()
