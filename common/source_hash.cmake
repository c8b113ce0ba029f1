# Writes a header that defines PERSEUS_SOURCE_HASH, of the contents and names of the core's sources, whatever folder they
# are in: cmake -DSOURCE_DIR=common -DOUTPUT=header.h -P source_hash.cmake
file(GLOB_RECURSE sources RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/*.h ${SOURCE_DIR}/*.cc
     ${SOURCE_DIR}/*.inc)
list(SORT sources)
set(text "")
foreach(source ${sources})
  file(SHA256 ${SOURCE_DIR}/${source} hash)
  string(APPEND text "${source} ${hash}\n")
endforeach()
string(SHA256 hash "${text}")
string(SUBSTRING ${hash} 0 12 hash)
set(header "#define PERSEUS_SOURCE_HASH \"${hash}\"\n")
set(before "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT header STREQUAL before) # nothing is compiled again otherwise
  file(WRITE ${OUTPUT} "${header}")
endif()
