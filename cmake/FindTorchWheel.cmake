# Finds the torch wheel of the Python that builds, without importing torch.
#
# Why not find_package(Torch): with a CUDA wheel it wants the whole CUDA toolkit, of which this project uses nothing.
# Why not `import torch`: a CUDA wheel cannot be imported before its CUDA packages are there, and compiling and
# linking against it needs none of them.
#
# In:   TORCHFT_EXT_TORCH_DIR (cache; empty: ask Python3_EXECUTABLE where `torch` is)
# Out:  TorchWheel_FOUND, TorchWheel_DIR, TorchWheel_VERSION ("2.13.0+cpu"), TorchWheel_MINOR ("2.13"),
#       TorchWheel_LIBRARY_DIR, targets TorchWheel::c10 (streams, events, guards), TorchWheel::cpp (C++ API) and
#       TorchWheel::python (bindings)

set(TORCHFT_EXT_TORCH_DIR "" CACHE PATH "torch's package directory; empty: the one that Python finds")

set(TorchWheel_DIR "${TORCHFT_EXT_TORCH_DIR}")
if(NOT TorchWheel_DIR)
  if(NOT Python3_EXECUTABLE)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
  endif()
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE TorchWheel_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE _torch_wheel_status)
  if(NOT _torch_wheel_status EQUAL 0 OR NOT TorchWheel_DIR)
    message(FATAL_ERROR "No torch for ${Python3_EXECUTABLE}. Install torch there first, or pass -DTORCHFT_EXT_TORCH_DIR=<.../site-packages/torch>.")
  endif()
endif()

if(NOT EXISTS "${TorchWheel_DIR}/version.py")
  message(FATAL_ERROR "${TorchWheel_DIR} is not a torch package: it has no version.py.")
endif()
file(STRINGS "${TorchWheel_DIR}/version.py" _torch_wheel_line REGEX "^__version__ *=")
if(NOT _torch_wheel_line MATCHES "['\"](([0-9]+\\.[0-9]+)[^'\"]*)['\"]")
  message(FATAL_ERROR "${TorchWheel_DIR}/version.py: expected a line __version__ = '2.x.y', found '${_torch_wheel_line}'.")
endif()
set(TorchWheel_VERSION "${CMAKE_MATCH_1}")
set(TorchWheel_MINOR "${CMAKE_MATCH_2}")
set(TorchWheel_LIBRARY_DIR "${TorchWheel_DIR}/lib")

foreach(_lib torch_cpu c10 torch torch_python)
  if(NOT EXISTS "${TorchWheel_LIBRARY_DIR}/lib${_lib}.so")
    message(FATAL_ERROR "torch ${TorchWheel_VERSION} in ${TorchWheel_DIR} has no lib/lib${_lib}.so; expected a Linux wheel of torch.")
  endif()
endforeach()

if(NOT TARGET TorchWheel::cpp)
  add_library(TorchWheel::c10 INTERFACE IMPORTED GLOBAL)
  target_include_directories(
    TorchWheel::c10 SYSTEM INTERFACE "${TorchWheel_DIR}/include"
                                     "${TorchWheel_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(TorchWheel::c10 INTERFACE _GLIBCXX_USE_CXX11_ABI=1 NDEBUG)
  # A CUDA wheel's libraries name others that need not be here at link time.
  target_link_options(TorchWheel::c10 INTERFACE -Wl,--allow-shlib-undefined)
  target_link_libraries(TorchWheel::c10 INTERFACE "${TorchWheel_LIBRARY_DIR}/libc10.so")

  add_library(TorchWheel::cpp INTERFACE IMPORTED GLOBAL)
  target_link_libraries(TorchWheel::cpp INTERFACE TorchWheel::c10 "${TorchWheel_LIBRARY_DIR}/libtorch_cpu.so")

  add_library(TorchWheel::python INTERFACE IMPORTED GLOBAL)
  target_link_libraries(TorchWheel::python INTERFACE TorchWheel::cpp "${TorchWheel_LIBRARY_DIR}/libtorch_python.so"
                                                     "${TorchWheel_LIBRARY_DIR}/libtorch.so")
endif()
set(TorchWheel_FOUND TRUE)
