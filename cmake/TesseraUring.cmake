# Defines liburing as the target tessera::uring, for Tessera's build and for users of an installed copy. The archive is
# used if there is one, so that programs also run on machines without liburing.
if(TARGET tessera::uring)
  return()
endif()
find_library(TESSERA_URING_LIBRARY NAMES liburing.a uring)
if(NOT TESSERA_URING_LIBRARY)
  message(FATAL_ERROR "liburing not found. scripts/setup installs it (Debian: liburing-dev); for a copy elsewhere set "
    "TESSERA_URING_LIBRARY to the library.")
endif()
add_library(tessera::uring INTERFACE IMPORTED GLOBAL)
target_link_libraries(tessera::uring INTERFACE ${TESSERA_URING_LIBRARY})
