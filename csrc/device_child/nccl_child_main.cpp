// The child process of a ProcessGroupBabyNCCL: the NCCL engine, beside a program that may kill it.
#include <dlfcn.h>

#include "device_child/device_program.h"

int main(int argc, char** argv) {
  // What the engine looks for where torch has loaded it: the streams of CUDA, and the runtime under
  // them. Where there is none, the engine says so.
  ::dlopen("libc10_cuda.so", RTLD_NOW | RTLD_LOCAL);
  return torchft_ext::device_child::run("torchft_ext_nccl_child", "nccl", argc, argv);
}
