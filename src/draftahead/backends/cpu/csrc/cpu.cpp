// Which instruction sets this CPU runs, and whether the operating system keeps their registers.
// Compiled without options for any of them.

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#ifdef FOR_OLD_GLIBC  // see threads.h
#include <new>
// What newer compilers call when an array's size overflows. Older systems' runtimes lack it.
namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif

namespace {

#if defined(__x86_64__)

bool has_avx2() {
  unsigned a, b, c = 0, d;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

#elif defined(__aarch64__)

bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP, which old headers lack
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) && found;
#else
  return false;
#endif
}

#endif

}  // namespace

// The names of compiler.py, the fastest first, with spaces between them; empty: our kernels do not
// run here.
extern "C" const char* draftahead_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_vnni()) return "avx512vnni avx512 avx2";
  if (has_avx512()) return "avx512 avx2";
  return has_avx2() ? "avx2" : "";
#elif defined(__aarch64__)
  return has_dotprod() ? "dotprod neon" : "neon";
#else
  return "";
#endif
}
