// The default floating-point mode for as long as an object of this lives. Thread-safe: the mode is the thread's own.
#pragma once

namespace perseus::kernels {

// A caller's thread may flush denormals (libraries built with -ffast-math switch that on for it, frameworks offer it)
// or round another way. Any thread may reduce, so the default mode is set for the duration.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(read()) {
    if ((saved_ & kModes) != 0) write(saved_ & ~kModes);
  }
  ~DefaultFloatMode() {
    if ((saved_ & kModes) != 0) write(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Register = unsigned int;
  static constexpr Register kModes = 0xe040;  // flush to zero, rounding control, denormals are zero
  static Register read() { return __builtin_ia32_stmxcsr(); }
  static void write(Register value) { __builtin_ia32_ldmxcsr(value); }
#elif defined(__aarch64__)
  using Register = unsigned long;
  static constexpr Register kModes = Register{0x1f} << 22;  // default NaN excepted: FZ16, RMode, FZ and its neighbours
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#else
  using Register = unsigned int;
  static constexpr Register kModes = 0;
  static Register read() { return 0; }
  static void write(Register) {}
#endif
  Register saved_;
};

}  // namespace perseus::kernels
