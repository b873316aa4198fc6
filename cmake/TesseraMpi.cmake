# Decides whether the plug-in libtessera_mpi.so is built: TESSERA_HAVE_MPI, with the target MPI::MPI_CXX. An MPI and its
# header must be there (Debian: libopenmpi-dev). No test and no other target needs them.
#
# TESSERA_MPI=AUTO builds it if that is possible, and ON requires it. It is left out with sanitizers, since MPI itself
# has leaks and races.
set(TESSERA_HAVE_MPI OFF)
if(NOT TESSERA_MPI STREQUAL "OFF" AND NOT TESSERA_SANITIZE)
  set(MPI_CXX_SKIP_MPICXX ON)  # the plug-in needs only MPI's interface for C
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(TESSERA_HAVE_MPI ON)
  elseif(TESSERA_MPI STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_MPI=ON, but no MPI with its header mpi.h was found. Debian has one in libopenmpi-dev.")
  endif()
endif()
message(STATUS "MPI plug-in: ${TESSERA_HAVE_MPI}")
