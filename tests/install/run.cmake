# run(<command>...): prints the command's output, stores it in `output`, and ends the script if the command fails.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(failed)
    message(FATAL_ERROR "failed (${failed}): ${ARGN}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()
