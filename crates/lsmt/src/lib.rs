//! Layered images in the open overlaybd format.
