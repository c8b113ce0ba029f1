# The three libraries of OpenCV that Caffe uses. Debian's own file of this name comes with all of OpenCV.
find_path(OpenCV_INCLUDE_DIRS opencv2/core.hpp PATH_SUFFIXES opencv4 REQUIRED)
set(OpenCV_LIBS opencv_imgcodecs opencv_imgproc opencv_core)
