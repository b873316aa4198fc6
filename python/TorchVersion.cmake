# tessera_version_of_torch(<folder> <variable>): "2.11.0+cu130", as torch.__version__ has it.
function(tessera_version_of_torch folder result)
  file(STRINGS ${folder}/version.py line REGEX "^__version__ *(:.*)?=")
  string(REGEX REPLACE ".*= *['\"](.*)['\"].*" "\\1" version "${line}")
  set(${result} ${version} PARENT_SCOPE)
endfunction()

# tessera_minor_of_torch(<version> <variable>): "2.11".
function(tessera_minor_of_torch version result)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  set(${result} ${minor} PARENT_SCOPE)
endfunction()
