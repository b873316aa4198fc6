# Takes this tree into another project with FetchContent. The whole library would take minutes to build a second time.
# So this configures, builds its lowest layer, and compiles the program that uses the public headers, without linking
# it.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${SCRATCH})
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/fetched -B ${SCRATCH} -G Ninja -DTESSERA_SOURCE=${SOURCE}
    -DTESSERA_TORCH_ROOT=${TORCH} -DTESSERA_CUDA=OFF)
run(${CMAKE_COMMAND} --build ${SCRATCH} --target tessera_base CMakeFiles/fetched.dir/main.cc.o)
